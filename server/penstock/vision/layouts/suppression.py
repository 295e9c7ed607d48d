"""Non-maximum suppression, and the overlap of boxes."""

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import BoolArray

MAX_CANDIDATES = 1024
MAX_PIXEL = 1e6  # coordinates are clipped to it: differences and areas then never overflow
_MAX_PAIRS = 1 << 14  # pairs of boxes of a class, up to which overlaps are computed before NMS
_MIN_BOXES = 512  # boxes from which that is faster
_MARGIN = 1e-3  # of an overlap: OpenCV's arithmetic can differ


_Numbers = npt.NDArray[Any]


def non_maximum_suppression(xyxy: FloatArray, score: FloatArray, class_id: IntArray, iou_threshold: float) -> IntArray:
    """Indices of the selected boxes by descending score: greedy, per class, among the best MAX_CANDIDATES.

    score: above 0. Empty boxes are not selected. Of many boxes, those that overlap none of their class are selected
    at once: OpenCV compares each box with all selected ones of all classes.
    """
    order = np.argsort(-score, kind="stable")
    order = order[(xyxy[order, 2:] > xyxy[order, :2]).all(axis=1)][:MAX_CANDIDATES]
    if not len(order):
        return order.astype(np.int64)
    boxes = np.clip(xyxy[order].astype(np.float64), -MAX_PIXEL, MAX_PIXEL)
    scores, classes = score[order].astype(np.float32), class_id[order].astype(np.int32)
    is_selected = np.ones(len(order), np.bool_)
    rivals = np.flatnonzero(_have_rivals(boxes, classes, iou_threshold))
    is_selected[rivals] = False
    is_selected[rivals[_suppressed(boxes[rivals], scores[rivals], classes[rivals], iou_threshold)]] = True
    return order[is_selected].astype(np.int64)


def _suppressed(boxes: _Numbers, scores: FloatArray, classes: _Numbers, iou_threshold: float) -> IntArray:
    """Indices of the boxes (n, 4) that OpenCV selects."""
    if not len(boxes):
        return np.zeros(0, np.int64)
    sized = boxes.copy()
    sized[:, 2:] -= sized[:, :2]
    sized[:, :2] -= sized[:, :2].min(axis=0)  # OpenCV separates the classes by an offset, which needs positive corners
    suppress: Any = cv2.dnn.NMSBoxesBatched  # its stubs do not know arrays
    return np.asarray(suppress(sized, scores, classes, 0.0, float(iou_threshold)), np.int64).reshape(-1)


def _have_rivals(boxes: _Numbers, classes: _Numbers, iou_threshold: float) -> BoolArray:
    """(n,): whether a box may suppress another of its class or be suppressed. All, if there are few boxes or classes.

    boxes: (n, 4) corners. classes: (n,).
    """
    if len(boxes) < _MIN_BOXES:
        return np.ones(len(boxes), np.bool_)
    by_class = np.argsort(classes, kind="stable")
    ordered = classes[by_class]
    followers = np.searchsorted(ordered, ordered, "right") - np.arange(len(ordered)) - 1
    pairs = int(followers.sum())
    if pairs > _MAX_PAIRS:
        return np.ones(len(boxes), np.bool_)
    second = np.arange(pairs) + np.repeat(np.arange(1, len(ordered) + 1) - np.cumsum(followers) + followers, followers)
    shared: _Numbers = np.ones(pairs)
    for low, high in ((0, 2), (1, 3)):
        begin, end = boxes[by_class, low], boxes[by_class, high]
        side = np.minimum(np.repeat(end, followers), end.take(second))
        side -= np.maximum(np.repeat(begin, followers), begin.take(second))
        shared *= np.maximum(side, 0.0)
    touching = np.flatnonzero(shared)
    one, other = np.repeat(np.arange(len(ordered)), followers)[touching], second[touching]
    areas, shared = _areas(boxes[by_class]), shared[touching]
    near = shared > (iou_threshold - _MARGIN) * (areas[one] + areas[other] - shared)
    found = np.zeros(len(boxes), np.bool_)
    found[by_class[one[near]]], found[by_class[other[near]]] = True, True
    return found


def _areas(boxes: _Numbers) -> _Numbers:
    sides = np.clip(boxes[:, 2:] - boxes[:, :2], 0.0, None)
    areas: _Numbers = sides[:, 0] * sides[:, 1]
    return areas


def overlaps(one: FloatArray, other: FloatArray) -> FloatArray:
    """Intersection over union of boxes (n, 4) and (m, 4): (n, m); 0 if both boxes are empty."""
    areas = _areas(one)[:, np.newaxis] + _areas(other)[np.newaxis]
    return _intersection_over_union(one[:, np.newaxis], other[np.newaxis], areas)


def _intersection_over_union(one: _Numbers, other: _Numbers, areas: _Numbers) -> _Numbers:
    """Of boxes (…, 4) that broadcast to each other. areas: the sum of both; 0 where it is 0."""
    low, high = np.maximum(one[..., :2], other[..., :2]), np.minimum(one[..., 2:], other[..., 2:])
    sides = np.clip(high - low, 0.0, None)
    shared = sides[..., 0] * sides[..., 1]
    union = areas - shared
    found: _Numbers = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return found
