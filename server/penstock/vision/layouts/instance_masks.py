"""Instance segmentation: boxes with a mask each, from coefficients and prototypes, or from a mask per query.

Sources: ultralytics examples/YOLOv8-Segmentation-ONNXRuntime-Python/main.py, ultralytics/yolov5 models/yolo.py,
roboflow/rf-detr PostProcess (read, not used).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np

from penstock.protocol.inference import FloatArray
from penstock.protocol.vision_results import Detections, Mask
from penstock.vision.layouts.detection_rows import rows_over_threshold
from penstock.vision.layouts.detr import best_pairs, query_outputs
from penstock.vision.layouts.layout import (
    FINAL_MASK_OPTIONS,
    Layout,
    LayoutOptions,
    Outputs,
    corners_of,
    finish_boxes,
    logit,
    probabilities,
)
from penstock.vision.layouts.yolo import anchor_columns, boxes_of_anchors, scores_and_objectness
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_BOX = 4
_FINAL = 6  # columns before the coefficients: corners, score, class
_MAX_VALUE = 1e15  # of coefficients and prototypes: the sums of their products stay within float32
_MAX_MASK_PIXELS = 1 << 28  # of all masks of a picture, a byte each
_STRIPE_PIXELS = 1 << 18


def parse_yolov8_seg(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses rows (4 + classes + m, n) or their transpose, and prototypes (m, h, w). Raises EngineFailed."""
    name, prototypes = _prototypes(outputs, options, geometry)
    count = len(prototypes)
    columns = anchor_columns(outputs, name, geometry, least_columns=_BOX + 1 + count)
    boxes, row = boxes_of_anchors(columns, probabilities(columns[_BOX:-count], options), options, geometry)
    return _with_prototypes(boxes, columns[-count:, row].T, prototypes, outputs, options, geometry)


def parse_yolov5_seg(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses rows (n, 5 + classes + m) or their transpose, and prototypes (m, h, w). Raises EngineFailed."""
    name, prototypes = _prototypes(outputs, options, geometry)
    count = len(prototypes)
    columns = anchor_columns(outputs, name, geometry, least_columns=_BOX + 2 + count, is_rows_first=True)
    scores, objectness = scores_and_objectness(columns[:-count], options)
    boxes, row = boxes_of_anchors(columns, scores, options, geometry, objectness=objectness)
    return _with_prototypes(boxes, columns[-count:, row].T, prototypes, outputs, options, geometry)


def parse_end2end_seg(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses rows (n, 6 + m): xyxy in network pixels, score, class, coefficients; prototypes (m, h, w). Final.

    Raises EngineFailed.
    """
    name, prototypes = _prototypes(outputs, options, geometry)
    meaning = "x0, y0, x1, y1, score, class, a coefficient per prototype"
    rows, class_id = rows_over_threshold(outputs, name, options, _FINAL + len(prototypes), meaning)
    boxes, index = finish_boxes(
        rows[:, :_BOX], rows[:, _BOX], class_id, options, geometry.to_source, needs_suppression=False
    )
    return _with_prototypes(boxes, rows[index, _FINAL:], prototypes, outputs, options, geometry)


def parse_rf_detr_seg(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses dets (queries, 4), labels (queries, classes) and masks (queries, h, w) of logits. Raises EngineFailed."""
    names = outputs.pick(options, ("dets", "pred_boxes"), ("labels", "pred_logits"), ("masks", "pred_masks"))
    rows, logits = query_outputs(outputs, names[0], names[1])
    found = best_pairs(logits, options)
    boxes, index = finish_boxes(
        corners_of(rows[found.row]),
        found.score,
        found.class_id,
        options,
        geometry.normalised_to_source,
        needs_suppression=False,
    )
    if not options.needs_masks:
        return boxes
    row, planes = found.row[index], outputs.floats(names[2], rank=3)
    if len(planes) != len(rows) or 0 in planes.shape:
        raise outputs.refuse(names[2], planes, f"[{len(rows)}, h, w] (a mask for each box of {names[0]!r})")

    def logits_of(one: int, rows: slice, columns: slice) -> FloatArray:
        return np.clip(planes[row[one], rows, columns], -_MAX_VALUE, _MAX_VALUE)

    _, height, width = planes.shape
    axes = _axes(geometry, (width, height), (width, height))
    return _with_masks(outputs, boxes, logits_of, axes, options, geometry)


def _prototypes(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> tuple[str, FloatArray]:
    """The name of the rows' output, and the prototypes (m, h, w): the first outputs of 2 and of 3 dimensions."""
    names = [name for name in options.output_names if outputs.response.output(name) is not None]
    ranks = [len(tensor.shape) for name in names if (tensor := outputs.response.output(name)) is not None]
    most = max(ranks, default=0)
    if most < 3 or most - 1 not in ranks:
        missing = [name for name in options.output_names if name not in names]
        what = "is missing" if missing else "needs a second output"
        raise outputs.broken(
            (missing or list(options.output_names))[0], f"{what}: rows [n, columns] and prototypes [m, h, w] are read"
        )
    name = names[ranks.index(most)]
    prototypes = outputs.floats(name, rank=3)
    _, height, width = prototypes.shape
    if 0 in prototypes.shape or height > geometry.network_height or width > geometry.network_width:
        expected = f"[m, h, w] within the network's input of {geometry.network_width}x{geometry.network_height}"
        raise outputs.refuse(name, prototypes, expected)
    return names[ranks.index(most - 1)], prototypes


def _with_prototypes(
    boxes: Detections,
    coefficients: FloatArray,
    prototypes: FloatArray,
    outputs: Outputs,
    options: LayoutOptions,
    geometry: Geometry,
) -> Detections:
    """coefficients: (boxes, m). A mask's logits are the sum of the prototypes (m, h, w), each by its coefficient."""
    factors = np.clip(coefficients, -_MAX_VALUE, _MAX_VALUE)

    def logits_of(one: int, rows: slice, columns: slice) -> FloatArray:
        part = np.clip(prototypes[:, rows, columns], -_MAX_VALUE, _MAX_VALUE)
        logits: FloatArray = np.einsum("m,mhw->hw", factors[one], part)  # a BLAS would start threads
        return logits

    _, height, width = prototypes.shape
    axes = _axes(geometry, (width, height), (geometry.network_width, geometry.network_height))
    return _with_masks(outputs, boxes, logits_of, axes, options, geometry)


class _Axis(NamedTuple):
    """One axis of a map of the network's image, which is resized twice: to `between`, then, cut, to the picture.

    size, between, source: lengths in pixels. between = source * scale + pad; pixels first to last of it are the
    picture's part.
    """

    size: int
    between: int
    scale: float
    pad: float
    first: int
    last: int

    def steps(self, low: int, high: int) -> tuple["_Step", "_Step"]:
        """Both resizes, for pixels low to high - 1 of the picture: map to between, between to picture."""
        second = _Step.of(self.scale, self.pad, (low, high), (self.first, self.last))
        return _Step.of(self.size / self.between, 0.0, (second.low, second.high), (0, self.size - 1)), second


class _Step(NamedTuple):
    """A bilinear resize along an axis: pixel i has the value at i * scale + shift of the pixels low to high - 1."""

    low: int
    high: int
    scale: float
    shift: float
    length: int

    @classmethod
    def of(cls, scale: float, pad: float, span: tuple[int, int], limits: tuple[int, int]) -> "_Step":
        """span: pixels first to last + 1 of the result. limits: first and last pixel that may be read."""
        start = (span[0] + 0.5) * scale + pad - 0.5
        end = (span[1] - 0.5) * scale + pad - 0.5
        low = min(max(math.floor(start), limits[0]), limits[1])
        high = min(max(math.floor(end) + 1, low), limits[1]) + 1
        return cls(low, high, scale, start - low, span[1] - span[0])


def _axes(geometry: Geometry, size: tuple[int, int], between: tuple[int, int]) -> tuple[_Axis, _Axis]:
    """x and y. size: of the map. between: of the first resize. Both (width, height)."""

    def axis(size: int, between: int, network: int, scale: float, pad: float, source: int) -> _Axis:
        scale, pad = scale * between / network, pad * between / network
        first = min(max(round(pad), 0), between - 1)
        last = max(round(min(pad + source * scale, between)) - 1, first)
        return _Axis(size, between, scale, pad, first, last)

    return (
        axis(size[0], between[0], geometry.network_width, geometry.scale_x, geometry.pad_x, geometry.source_width),
        axis(size[1], between[1], geometry.network_height, geometry.scale_y, geometry.pad_y, geometry.source_height),
    )


def _with_masks(
    outputs: Outputs,
    boxes: Detections,
    logits_of: Callable[[int, slice, slice], FloatArray],
    axes: tuple[_Axis, _Axis],
    options: LayoutOptions,
    geometry: Geometry,
) -> Detections:
    """The boxes with a mask each, cut to its box: pixels i with x0 <= i < x1.

    logits_of: (h, w) of a box's index, and of rows and columns of the map. Masks differ in size: this is a loop.
    """
    if not options.needs_masks:
        return boxes
    corners = np.ceil(boxes.xyxy).astype(np.int64)
    pixels = int((corners[:, 2:] - corners[:, :2]).prod(axis=1).sum())
    if pixels > max(_MAX_MASK_PIXELS, 4 * geometry.source_width * geometry.source_height):
        raise outputs.too_large(
            options.output_names[0],
            f"gives {len(corners)} boxes of {pixels} pixels; at most {_MAX_MASK_PIXELS} are computed as masks. Lower "
            "max-detections, raise pre-cluster-threshold, send a smaller picture, or request masks=none",
        )
    level = logit(options.segmentation_threshold)
    masks = []
    for index, (left, top, right, bottom) in enumerate(corners.tolist()):
        bits = np.empty((bottom - top, right - left), np.bool_)
        if bits.size:
            (to_x, x), (to_y, y) = axes[0].steps(left, right), axes[1].steps(top, bottom)
            logits = logits_of(index, slice(to_y.low, to_y.high), slice(to_x.low, to_x.high))
            between = _resized(logits, to_x, to_y, 0, to_y.length)
            count = max(_STRIPE_PIXELS // x.length, 1)
            for row in range(0, y.length, count):
                part = bits[row : row + count]
                np.greater(_resized(between, x, y, row, len(part)), level, out=part)
        masks.append(Mask(geometry.source_height, geometry.source_width, left, top, bits))
    return replace(boxes, masks=tuple(masks))


def _resized(values: FloatArray, x: _Step, y: _Step, row: int, count: int) -> FloatArray:
    """Rows of the result of two steps. Pixels beyond the values repeat the edge."""
    to_values = np.array([[x.scale, 0.0, x.shift], [0.0, y.scale, y.shift + row * y.scale]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    resized: FloatArray = cv2.warpAffine(
        values, to_values, (x.length, count), flags=flags, borderMode=cv2.BORDER_REPLICATE
    )
    return resized


_ROWS = (
    "float `[n, {0} + classes + m]` or its transpose: centre x, y, width and height in pixels of the network's input, "
    "{1}a score per class, m coefficients; and the prototypes, float `[m, h, w]`. "
)
LAYOUTS = (
    Layout(
        "yolov8-seg", NetworkType.INSTANCE_SEGMENTATION, parse_yolov8_seg, _ROWS.format(4, "") + "YOLOv8 and YOLO11"
    ),
    Layout(
        "yolov5-seg",
        NetworkType.INSTANCE_SEGMENTATION,
        parse_yolov5_seg,
        _ROWS.format(5, "objectness, ") + "YOLOv5 and YOLOv7",
    ),
    Layout(
        "yolo-end2end-seg",
        NetworkType.INSTANCE_SEGMENTATION,
        parse_end2end_seg,
        "float `[n, 6 + m]`: x0, y0, x1, y1 in pixels of the network's input, score, class, m coefficients; no "
        "NMS; and the prototypes, float `[m, h, w]`. YOLO26",
        uses=FINAL_MASK_OPTIONS,
    ),
    Layout(
        "rf-detr-seg",
        NetworkType.INSTANCE_SEGMENTATION,
        parse_rf_detr_seg,
        "`dets` and `labels` as of `rf-detr`; `masks` float `[queries, h, w]`: a mask's logits for the network's image",
        uses=FINAL_MASK_OPTIONS,
    ),
)
