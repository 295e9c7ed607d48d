"""Detectors with a heatmap of object centres and the distances to the box's edges, over one grid.

`heatmap` has a logit per class and cell. `distances` has the logarithms of the distances, in cells, from the cell's
centre to the left, top, right and bottom edge. Each local maximum of 3 x 3 cells gives a box.
"""

import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs, finish_detections
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

HEATMAP, DISTANCES = "heatmap", "distances"

_LOGARITHMS = (-20.0, 20.0)  # clipped: exp() beyond it has no meaning for a picture
_LEAST_LOGIT = -60.0


def parse_center_heatmap(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses one image's heatmap (classes, rows, columns) and distances (4, rows, columns). Raises EngineFailed."""
    heat = outputs.floats(HEATMAP, rank=3)
    distances = outputs.floats(DISTANCES, rank=3)
    _, rows, columns = heat.shape
    if 0 in heat.shape:
        raise outputs.refuse(HEATMAP, heat, "[classes, rows, columns]")
    if distances.shape != (4, rows, columns):
        raise outputs.refuse(DISTANCES, distances, f"[4, {rows}, {columns}] (a box a cell of {HEATMAP!r})")
    score = (1 / (1 + np.exp(-np.maximum(heat, _LEAST_LOGIT)))).astype(np.float32)
    class_id, row, column = np.nonzero((score > options.pre_cluster_threshold) & _is_peak(heat))
    xyxy = _boxes(distances[:, row, column], row, column, (rows, columns))
    found = score[class_id, row, column]
    return finish_detections(xyxy, found, class_id, options, geometry.normalised_to_source)


def _is_peak(heat: FloatArray) -> npt.NDArray[np.bool_]:
    """Whether no neighbour of the same class is higher."""
    _, rows, columns = heat.shape
    padded = np.pad(heat, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    tallest = np.maximum.reduce([padded[:, :rows], padded[:, 1 : rows + 1], padded[:, 2:]])
    tallest = np.maximum.reduce([tallest[..., :columns], tallest[..., 1 : columns + 1], tallest[..., 2:]])
    peaks: npt.NDArray[np.bool_] = heat >= tallest
    return peaks


def _boxes(distances: FloatArray, row: IntArray, column: IntArray, size: tuple[int, int]) -> FloatArray:
    """distances: (4, n) logarithms. Returns (n, 4) xyxy in fractions of the network's image."""
    reach = np.exp(np.clip(distances.astype(np.float64), *_LOGARITHMS))
    middle = np.stack([column + 0.5, row + 0.5])
    xyxy = np.concatenate([middle - reach[:2], middle + reach[2:]]).T
    scaled: FloatArray = (xyxy / np.array([size[1], size[0]] * 2)).astype(np.float32)
    return scaled


LAYOUTS = (
    Layout(
        "center-heatmap",
        NetworkType.DETECTOR,
        parse_center_heatmap,
        "`heatmap` float `[classes, rows, columns]`: a logit per class and cell; `distances` float `[4, rows, columns]`"
        ": natural logarithms of the distances, in cells, from the cell's centre to the box's left, top, right and "
        "bottom edges",
        threshold=0.2,
        iou=0.3,
    ),
)
