"""FastestDet: one feature map, one box per cell.

Source: github.com/dog-qiuqiu/FastestDet at 50473cd1. The network applies sigmoid (objectness) and softmax (classes).
score = objectness^0.6 * class^0.4, centre = (cell + tanh(offset)) / cells, size = sigmoid, in fractions of the image.
"""

import numpy as np

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs, finish_detections, sigmoid
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_OBJECTNESS_POWER, _CLASS_POWER = 0.6, 0.4
_FIRST_CLASS = 5  # channel 0 is objectness, 1 to 4 the box


def parse_fastestdet(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses one image's first output, (5 + classes, rows, columns). Raises EngineFailed."""
    name = options.output_names[0]
    grid = outputs.floats(name, rank=3)
    channels, rows, columns = grid.shape
    if channels <= _FIRST_CLASS or rows == 0 or columns == 0:
        raise outputs.refuse(name, grid, "[5 + classes, rows, columns]")
    cells = grid.reshape(channels, rows * columns)
    class_id = cells[_FIRST_CLASS:].argmax(axis=0)
    likelihood = np.take_along_axis(cells[_FIRST_CLASS:], class_id[np.newaxis], axis=0)[0]
    score = np.clip(cells[0], 0.0, 1.0) ** _OBJECTNESS_POWER * np.clip(likelihood, 0.0, 1.0) ** _CLASS_POWER
    hot = np.flatnonzero(score > options.lowest_threshold())
    xyxy = _boxes(cells[1:_FIRST_CLASS, hot], hot // columns, hot % columns, (rows, columns))
    return finish_detections(xyxy, score[hot], class_id[hot], options, geometry.normalised_to_source)


def _boxes(box: FloatArray, row: IntArray, column: IntArray, size: tuple[int, int]) -> FloatArray:
    """box: (4, n) raw offset x, offset y, width, height. Returns (n, 4) xyxy in fractions of the image."""
    offset, side = np.tanh(box[:2].astype(np.float64)), sigmoid(box[2:].astype(np.float64))
    centre = (np.stack([column, row]) + offset) / np.array([[size[1]], [size[0]]])
    return np.concatenate([centre - side / 2, centre + side / 2]).T.astype(np.float32)


LAYOUTS = (
    Layout(
        "fastestdet",
        NetworkType.DETECTOR,
        parse_fastestdet,
        "the first output, float `[5 + classes, rows, columns]`: objectness, x and y offset, width, height, then a "
        "score per class, as [FastestDet](https://github.com/dog-qiuqiu/FastestDet) exports it",
        threshold=0.2,
        iou=0.3,
    ),
)
