"""Boxes of two servers, compared: a peer that answers something else is no peer."""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_IOU = 0.99
SCORE_SLACK = 0.01

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Found:
    """A box in the picture's pixels."""

    xyxy: Box
    class_id: int
    score: float


def difference(ours: Sequence[Found], theirs: Sequence[Found], *, score_threshold: float) -> str:
    """What is not the same, as a sentence; empty where all is.

    Every box of one side has a twin of its class on the other at an IoU of 0.99 or more and a score within 0.01; only
    a box whose score lies within 0.01 of the model's threshold may be alone.
    """
    left = list(theirs)
    for box in ours:
        twins = [other for other in left if _is_twin(box, other)]
        if twins:
            left.remove(max(twins, key=lambda other: intersection_over_union(box.xyxy, other.xyxy)))
        elif box.score > score_threshold + SCORE_SLACK:
            return f"it does not find {box}, which we do (it has {len(theirs)} boxes, we have {len(ours)})"
    for box in left:
        if box.score > score_threshold + SCORE_SLACK:
            return f"it finds {box}, which we do not (it has {len(theirs)} boxes, we have {len(ours)})"
    return ""


def intersection_over_union(a: Box, b: Box) -> float:
    """Of two boxes; 0 where they do not touch."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def _is_twin(a: Found, b: Found) -> bool:
    return (
        a.class_id == b.class_id
        and abs(a.score - b.score) <= SCORE_SLACK
        and intersection_over_union(a.xyxy, b.xyxy) >= LEAST_IOU
    )
