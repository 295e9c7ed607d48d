"""Detectors of oriented boxes, and their NMS by the exact IoU.

Source: ultralytics/ultralytics ultralytics/nn/modules/head.py (read, not used). A box is its centre, width and height
in pixels, and the angle of the width's side in radians, clockwise in the picture.
"""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import Array, FloatArray, IntArray
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.detection_rows import rows_over_threshold
from penstock.vision.layouts.layout import (
    FINAL_BOX_OPTIONS,
    Layout,
    LayoutOptions,
    Outputs,
    best_classes,
    finish_boxes,
    probabilities,
)
from penstock.vision.layouts.yolo import anchor_columns
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType

_BOX = 4
_MAX_PIXELS = 1e6  # of centres and sides: products then never overflow
_MAX_SKEW = 0.1  # horizontal and vertical scale may differ by this share,
_MAX_SKEW_PIXELS = 2.0  # or by so many of the network's pixels: a letterbox rounds its sides
_PAIRS_AT_ONCE = 1 << 15
_ROUNDING = 1e-9
_FLAT = 1e-6  # height of an edge, in sides of the other box, that counts as none

Floats = npt.NDArray[np.float64]


def parse_yolov8_obb(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses (4 + classes + 1, n) or its transpose: cxcywh, scores, angle. Raises EngineFailed."""
    name = options.output_names[0]
    columns = anchor_columns(outputs, name, geometry, least_columns=_BOX + 2)
    found = best_classes(probabilities(columns[_BOX:-1], options), options)
    boxes = _bounded(np.concatenate([columns[:_BOX, found.row], columns[-1:, found.row]]).T)
    groups = np.zeros_like(found.class_id) if options.is_class_agnostic else options.mapped(found.class_id)
    kept = rotated_nms(boxes, found.score, groups, options.nms_iou_threshold)
    return _finish(outputs, boxes[kept], found.score[kept], found.class_id[kept], options, geometry)


def parse_end2end_obb(outputs: Outputs, options: LayoutOptions, geometry: Geometry) -> Detections:
    """Parses rows (n, 7): cxcywh in network pixels, score, class, angle. Final. Raises EngineFailed."""
    meaning = "centre x, y, width, height, score, class, angle"
    rows, class_id = rows_over_threshold(outputs, options.output_names[0], options, 7, meaning)
    return _finish(outputs, _bounded(rows[:, [0, 1, 2, 3, 6]]), rows[:, 4], class_id, options, geometry)


def _bounded(boxes: FloatArray) -> Floats:
    """(n, 5) float64: centres and sides within ±1e6, angles from -π/4 to 3π/4. Half a turn is the same box."""
    bounded = boxes.astype(np.float64)
    np.clip(bounded[:, :_BOX], -_MAX_PIXELS, _MAX_PIXELS, out=bounded[:, :_BOX])
    bounded[:, _BOX] = _wrapped(bounded[:, _BOX])
    return bounded


def _wrapped(angle: Floats) -> Floats:
    is_beyond = (angle < -math.pi / 4) | (angle > 3 * math.pi / 4)
    return np.where(is_beyond, (angle + math.pi / 4) % math.pi - math.pi / 4, angle)


def _finish(
    outputs: Outputs, boxes: Floats, score: FloatArray, class_id: IntArray, options: LayoutOptions, geometry: Geometry
) -> Detections:
    """boxes: (n, 5) in network pixels, after NMS."""
    difference = abs(geometry.scale_x - geometry.scale_y)
    pixels = difference * min(geometry.source_width, geometry.source_height)
    if difference > _MAX_SKEW * max(geometry.scale_x, geometry.scale_y) and pixels > _MAX_SKEW_PIXELS:
        raise outputs.broken(
            options.output_names[0],
            f"has oriented boxes, but the picture of {geometry.source_width}x{geometry.source_height} was stretched to "
            f"{geometry.network_width}x{geometry.network_height}, which changes angles: set maintain-aspect-ratio",
        )
    score = np.where((boxes[:, 2:4] > 0).all(axis=1), score, np.float32(0))  # drops empty boxes
    reach = np.abs(_half_sides(boxes)).sum(axis=1)
    xyxy = np.concatenate([boxes[:, :2] - reach, boxes[:, :2] + reach], axis=1)
    found, index = finish_boxes(xyxy, score, class_id, options, geometry.to_source, needs_suppression=False)
    return replace(found, xywhr=_to_source(boxes[index], geometry).astype(np.float32))


def _half_sides(boxes: Floats) -> Floats:
    """(n, 2, 2): x and y of half of the width's side, and of half of the height's. boxes: (n, 5)."""
    cosine, sine = np.cos(boxes[:, 4]), np.sin(boxes[:, 4])
    across, down = np.stack([cosine, sine], axis=1), np.stack([-sine, cosine], axis=1)
    return np.stack([across * boxes[:, 2:3], down * boxes[:, 3:4]], axis=1) / 2


def _to_source(boxes: Floats, geometry: Geometry) -> Floats:
    """(n, 5) in source pixels, not clipped."""
    scale = np.array([geometry.scale_x, geometry.scale_y])
    centre = (boxes[:, :2] - (geometry.pad_x, geometry.pad_y)) / scale
    sides = 2 * _half_sides(boxes) / scale
    angle = _wrapped(np.arctan2(sides[:, 0, 1], sides[:, 0, 0]))
    return np.concatenate([centre, np.hypot(sides[..., 0], sides[..., 1]), angle[:, np.newaxis]], axis=1)


def rotated_nms(boxes: Floats, score: FloatArray, group: IntArray, iou_threshold: float) -> IntArray:
    """Indices of the selected boxes by falling score: greedy, within each group. Empty boxes are not selected.

    boxes: (n, 5), centre, width, height, angle; n is at most some thousand. group: (n,), boxes of another one stay.
    """
    order = np.argsort(-score, kind="stable")
    order = order[(boxes[order, 2:4] > 0).all(axis=1)]
    sorted_boxes, groups = boxes[order], group[order]
    first, second = _overlapping_pairs(sorted_boxes, groups, iou_threshold)
    is_over = np.zeros((len(order), len(order)), np.bool_)
    for start in range(0, len(first), _PAIRS_AT_ONCE):
        one, other = first[start : start + _PAIRS_AT_ONCE], second[start : start + _PAIRS_AT_ONCE]
        is_over[one, other] = rotated_iou(sorted_boxes[one], sorted_boxes[other]) > iou_threshold
    is_selected = np.ones(len(order), np.bool_)
    for index in np.flatnonzero(is_over.any(axis=1)).tolist():
        if is_selected[index]:
            is_selected &= ~is_over[index]
    return order[is_selected]


def _overlapping_pairs(boxes: Floats, group: IntArray, iou_threshold: float) -> tuple[IntArray, IntArray]:
    """Pairs of indices, the smaller one first, of boxes of a group whose IoU may exceed the threshold.

    It is at most that of boxes of the same areas that share as much as the upright boxes around them.
    """
    reach, area = np.abs(_half_sides(boxes)).sum(axis=1), boxes[:, 2] * boxes[:, 3]
    is_near = np.triu(group[:, np.newaxis] == group, 1)
    for axis in range(2):
        low, high = boxes[:, axis] - reach[:, axis], boxes[:, axis] + reach[:, axis]
        is_near &= (low[:, np.newaxis] < high) & (low < high[:, np.newaxis])
    is_near &= (area[:, np.newaxis] * iou_threshold <= area) & (area * iou_threshold <= area[:, np.newaxis])
    first, second = np.nonzero(is_near)
    centre, other = boxes[first, :2], boxes[second, :2]
    high = np.minimum(centre + reach[first], other + reach[second])
    sides = high - np.maximum(centre - reach[first], other - reach[second])
    most = np.minimum(np.minimum(area[first], area[second]), sides[:, 0] * sides[:, 1])
    may_be_over = most * (1 + _ROUNDING) >= iou_threshold * (area[first] + area[second] - most)
    return first[may_be_over], second[may_be_over]


def rotated_iou(one: Floats, other: Floats) -> Floats:
    """Intersection over union (n,) of pairs of oriented boxes (n, 5) with sides over 0.

    In the frame of `one`, it is upright: |x| <= a, |y| <= b. The area of the other's part in it is an integral around
    the other's outline, of y limited to ±b, over x limited to ±a.
    """
    areas = one[:, 2] * one[:, 3], other[:, 2] * other[:, 3]
    a, b = one[:, 2:3] / 2, one[:, 3:4] / 2
    x, y = _corners_in_frame(one, other)
    next_x, next_y = np.roll(x, -1, axis=1), np.roll(y, -1, axis=1)
    run = next_x - x
    slope = np.divide(next_y - y, run, out=np.zeros_like(run), where=run != 0)
    from_x, to_x = np.clip(x, -a, a), np.clip(next_x, -a, a)
    from_y, to_y = y + (from_x - x) * slope, y + (to_x - x) * slope
    rise = to_y - from_y
    is_flat = np.abs(rise) <= _FLAT * b
    mean = np.divide(_integral(to_y, b) - _integral(from_y, b), rise, out=np.zeros_like(rise), where=~is_flat)
    mean = np.where(is_flat, np.clip((from_y + to_y) / 2, -b, b), mean)
    shared = np.abs((mean * (to_x - from_x)).sum(axis=1))
    shares: Floats = shared / (areas[0] + areas[1] - shared)
    return shares


def _corners_in_frame(one: Floats, other: Floats) -> tuple[Array, Array]:
    """x and y (n, 4) of the other's corners, in order, from the centre of `one` and along its sides."""
    shift, half = other[:, :2] - one[:, :2], _half_sides(other)
    signs = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]])
    corners = shift[:, np.newaxis] + signs @ half
    cosine, sine = np.cos(one[:, 4:5]), np.sin(one[:, 4:5])
    return corners[..., 0] * cosine + corners[..., 1] * sine, corners[..., 1] * cosine - corners[..., 0] * sine


def _integral(y: Floats, b: Floats) -> Floats:
    """The integral of the number limited to ±b, from 0 to y."""
    limited = np.clip(y, -b, b)
    return limited * (y - limited / 2)


LAYOUTS = (
    Layout(
        "yolov8-obb",
        NetworkType.DETECTOR,
        parse_yolov8_obb,
        "the first output, float `[n, 4 + classes + 1]` or its transpose: centre x, y, width and height in pixels of "
        "the network's input, a score per class, the angle of the width's side in radians, clockwise. Needs "
        "`maintain-aspect-ratio`. YOLOv8 and YOLO11",
        keeps_aspect_ratio=True,
    ),
    Layout(
        "yolo-end2end-obb",
        NetworkType.DETECTOR,
        parse_end2end_obb,
        "the first output, float `[n, 7]`: centre x, y, width and height in pixels of the network's input, score, "
        "class, angle as in `yolov8-obb`; no NMS. Needs `maintain-aspect-ratio`. YOLO26",
        keeps_aspect_ratio=True,
        uses=FINAL_BOX_OPTIONS,
    ),
)
