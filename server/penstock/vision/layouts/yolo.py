"""YOLO detectors whose output has one row for each anchor: box, perhaps objectness, and a score per class.

The rows are the first or the last axis. Their number follows from the network's size: an anchor (YOLOv5, YOLOv7: 3) for
each cell of grids with 8, 16 and 32 pixels a cell; larger models add 64, models for small objects 4.
"""

from functools import lru_cache
from itertools import product

import numpy as np

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.layout import (
    Layout,
    LayoutOptions,
    Outputs,
    best_classes,
    corners_of,
    finish_boxes,
    finish_detections,
    probabilities,
    sigmoid,
)
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_BOX = 4  # columns of a box
_STRIDES = (8, 16, 32)
_YOLOX_STRIDES = (_STRIDES, (*_STRIDES, 64))
_MAX_LOG = 20.0  # of a side in cells: exp() beyond it has no meaning for a picture


def parse_yolov8(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses (4 + classes, n) or (n, 4 + classes): cxcywh in network pixels, a score per class. Raises EngineFailed."""
    columns = anchor_columns(outputs, options.output_names[0], geometry, least_columns=_BOX + 1)
    return boxes_of_anchors(columns, probabilities(columns[_BOX:], options), options, geometry)[0]


def parse_yolov5(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses (n, 5 + classes) or its transpose: cxcywh in network pixels, objectness, a score per class.

    The score is objectness * class. Models of one class with three anchors a cell do not train the class: there, it is
    the objectness alone. Raises EngineFailed.
    """
    columns = anchor_columns(outputs, options.output_names[0], geometry, least_columns=_BOX + 2, is_rows_first=True)
    scores, objectness = scores_and_objectness(columns, options)
    if len(scores) == 1 and columns.shape[1] in anchor_counts(geometry.network_width, geometry.network_height, (3,)):
        scores = np.ones_like(scores)
    return boxes_of_anchors(columns, scores, options, geometry, objectness=objectness)[0]


def parse_yolox(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses (n, 5 + classes) or its transpose: objectness and scores as YOLOv5, boxes relative to their cells.

    Centre = (xy + cell) * stride, size = exp(wh) * stride, in network pixels. Raises EngineFailed.
    """
    name, (width, height) = options.output_names[0], (geometry.network_width, geometry.network_height)
    columns = anchor_columns(outputs, name, geometry, least_columns=_BOX + 2, is_rows_first=True)
    cells = _cells(width, height, columns.shape[1])
    if cells is None:
        counts = [sum(_cell_count(width, height, stride) for stride in strides) for strides in _YOLOX_STRIDES]
        raise outputs.refuse(name, columns.T, f"{counts[0]} or {counts[1]} rows for an input of {width}x{height}")
    scores, objectness = scores_and_objectness(columns, options)
    found = best_classes(scores, options, objectness=objectness)
    box, cell = columns[:_BOX, found.row].T.astype(np.float64), cells[found.row]
    centre, side = box[:, :2] + cell[:, :2], np.exp(np.minimum(box[:, 2:], _MAX_LOG))
    xyxy = corners_of(np.concatenate([centre, side], axis=1) * cell[:, 2:])
    return finish_detections(xyxy, found.score, found.class_id, options, geometry.to_source)


def parse_yolo_nas(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses boxes (n, 4) xyxy in network pixels, and scores (n, classes) or (classes, n). Raises EngineFailed."""
    box_name, score_name = outputs.pick(options, ("boxes", "pred_boxes"), ("scores", "pred_scores"))
    xyxy, scores = outputs.floats(box_name, rank=2), outputs.floats(score_name, rank=2)
    count = len(xyxy)
    if xyxy.shape != (count, _BOX):
        raise outputs.refuse(box_name, xyxy, "[n, 4]")
    if count not in scores.shape:
        raise outputs.refuse(score_name, scores, f"[{count}, classes] (a row per box of {box_name!r})")
    by_class = scores.T if len(scores) == count else scores
    found = best_classes(probabilities(by_class, options), options)
    return finish_detections(xyxy[found.row], found.score, found.class_id, options, geometry.to_source)


def boxes_of_anchors(
    columns: FloatArray,
    scores: FloatArray,
    options: LayoutOptions,
    geometry: Geometry,
    *,
    objectness: FloatArray | None = None,
) -> tuple[Detections, IntArray]:
    """Detections after threshold and NMS, and the row (k,) of each.

    columns: (columns, n), cxcywh in network pixels first. scores: (classes, n). objectness: (n,).
    """
    found = best_classes(scores, options, objectness=objectness)
    xyxy = corners_of(columns[:_BOX, found.row].T)
    boxes, index = finish_boxes(xyxy, found.score, found.class_id, options, geometry.to_source)
    return boxes, found.row[index]


def scores_and_objectness(columns: FloatArray, options: LayoutOptions) -> tuple[FloatArray, FloatArray]:
    """(classes, n) scores and (n,) objectness of columns (5 + classes, n)."""
    objectness = columns[_BOX]
    return probabilities(columns[_BOX + 1 :], options), sigmoid(objectness) if options.has_sigmoid else objectness


def anchor_columns(
    outputs: Outputs, name: str, geometry: Geometry, *, least_columns: int, is_rows_first: bool = False
) -> FloatArray:
    """An output (n, columns) or (columns, n) as (columns, n), a view. is_rows_first: for n = columns.

    Raises EngineFailed if it has less than least_columns.
    """
    array = outputs.floats(name, rank=2)
    first, last = array.shape
    known = anchor_counts(geometry.network_width, geometry.network_height)
    if (first in known) != (last in known):
        is_rows_first = first in known
    elif first != last:
        is_rows_first = first > last
    columns = array.T if is_rows_first else array
    if len(columns) < least_columns:
        raise outputs.refuse(name, array, f"[n, {least_columns - 1} + classes] or its transpose")
    return columns


@lru_cache(maxsize=64)
def anchor_counts(width: int, height: int, anchors_per_cell: tuple[int, ...] = (1, 3)) -> frozenset[int]:
    """The numbers of rows that networks with an input of this size can have."""
    p2, p6 = _cell_count(width, height, 4), _cell_count(width, height, 64)
    usual = sum(_cell_count(width, height, stride) for stride in _STRIDES)
    return frozenset(
        anchors * (usual + fine + coarse) for anchors, fine, coarse in product(anchors_per_cell, (0, p2), (0, p6))
    )


def _cell_count(width: int, height: int, stride: int) -> int:
    return (width // stride) * (height // stride)


@lru_cache(maxsize=16)
def _cells(width: int, height: int, count: int) -> FloatArray | None:
    """(count, 3): column, row and stride of each cell; None if YOLOX has no grids with this number of cells."""
    for strides in _YOLOX_STRIDES:
        if count == sum(_cell_count(width, height, stride) for stride in strides):
            grids = [np.indices((height // stride, width // stride)).reshape(2, -1)[::-1] for stride in strides]
            sides = np.repeat(strides, [grid.shape[1] for grid in grids])
            return np.vstack([np.hstack(grids), sides]).T.astype(np.float32)
    return None


_ROWS = "the first output, float `[n, {0} + classes]` or its transpose: "
_PIXELS = "centre x, y, width and height in pixels of the network's input, "
LAYOUTS = (
    Layout(
        "yolov8",
        NetworkType.DETECTOR,
        parse_yolov8,
        _ROWS.format(4) + _PIXELS + "a score per class. YOLOv8, YOLOv9, YOLO11, YOLO12",
    ),
    Layout(
        "yolov5",
        NetworkType.DETECTOR,
        parse_yolov5,
        _ROWS.format(5) + _PIXELS + "objectness, a score per class. YOLOv5 and YOLOv7 (with three anchors a cell and "
        "one class, the objectness is the score), YOLOv6, YOLOX with decoded boxes",
    ),
    Layout(
        "yolox",
        NetworkType.DETECTOR,
        parse_yolox,
        _ROWS.format(5) + "centre relative to the cell and logarithms of width and height, in cells of 8, 16, 32 and "
        "perhaps 64 pixels; objectness, a score per class. YOLOX as it is exported by default",
    ),
    Layout(
        "yolo-nas",
        NetworkType.DETECTOR,
        parse_yolo_nas,
        "`boxes` float `[n, 4]`: x0, y0, x1, y1 in pixels of the network's input; `scores` float `[n, classes]` or its "
        "transpose. Other names: in this order. YOLO-NAS exported without NMS",
    ),
)
