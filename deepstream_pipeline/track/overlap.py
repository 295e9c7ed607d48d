"""How much boxes overlap, in double precision: the library's own measure rounds places beyond 2^24."""

import numpy as np
import numpy.typing as npt
from trackers.utils.iou import BaseIoU

Array = npt.NDArray[np.float64]


class Overlap(BaseIoU):
    """Intersection over union."""

    def _compute(self, boxes_1: Array, boxes_2: Array) -> Array:
        ours, theirs = boxes_1[:, None], boxes_2[None]
        low = np.maximum(ours[..., :2], theirs[..., :2])
        sides = np.minimum(ours[..., 2:], theirs[..., 2:])
        sides -= low
        np.maximum(sides, 0, out=sides)
        shared: Array = sides[..., 0] * sides[..., 1]
        union = _area(boxes_1)[:, None] + _area(boxes_2)[None] - shared
        return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def _area(boxes: Array) -> Array:
    area: Array = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return area
