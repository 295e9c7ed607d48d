"""Non-maximum suppression, a class at a time. Deterministic: equal scores keep their order."""

import numpy as np
import numpy.typing as npt

from server.core.result import FloatArray, IntArray

MAX_CANDIDATES = 1024


def suppress(xyxy: FloatArray, score: FloatArray, class_id: IntArray, iou_threshold: float) -> IntArray:
    """Indices of the boxes to keep, by falling score: greedy, of two boxes of a class over the threshold the better.

    xyxy (n, 4) in any unit, score (n,), class_id (n,). Of more than 1,024 boxes the best 1,024 take part.
    """
    order = np.argsort(-score, kind="stable")[:MAX_CANDIDATES]
    boxes, classes = xyxy[order].astype(np.float64), class_id[order]
    areas = _areas(boxes)
    is_kept = np.ones(len(order), np.bool_)
    for best in range(len(order)):
        if is_kept[best]:
            rest = best + 1 + np.flatnonzero(is_kept[best + 1 :] & (classes[best + 1 :] == classes[best]))
            overlap = _overlaps(boxes[best], areas[best], boxes[rest], areas[rest])
            is_kept[rest[overlap > iou_threshold]] = False
    return order[is_kept].astype(np.int64)


def _areas(boxes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    sides = np.clip(boxes[:, 2:] - boxes[:, :2], 0.0, None)
    areas: npt.NDArray[np.float64] = sides[:, 0] * sides[:, 1]
    return areas


def _overlaps(
    box: npt.NDArray[np.float64], area: float, others: npt.NDArray[np.float64], areas: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Intersection over union; 0 where both boxes are empty."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    sides = np.clip(high - low, 0.0, None)
    shared = sides[:, 0] * sides[:, 1]
    union = area + areas - shared
    overlaps: npt.NDArray[np.float64] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return overlaps
