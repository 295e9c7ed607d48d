"""Plain decoding of detectors for tests: letterbox, IoU and NMS in loops, written from the exporters' descriptions.

Nothing here uses penstock.vision, so that a test compares two independent decodings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from penstock.protocol.vision_results import Detections

Array = npt.NDArray[Any]
LEAST_IOU = 0.99
SCORE_TOLERANCE = 1e-3


class PlainBox(NamedTuple):
    """One box: corners in pixels, class, score."""

    x0: float
    y0: float
    x1: float
    y1: float
    class_id: int
    score: float


@dataclass(frozen=True, slots=True)
class PlainFit:
    """How a picture is resized into the network's input: network = picture * scale + pad, in pixels."""

    width: int  # of the picture
    height: int
    resized_width: int
    resized_height: int
    left: int
    top: int
    network_width: int
    network_height: int

    def to_network(self, box: PlainBox) -> PlainBox:
        """The box in the network's pixels."""
        x_scale, y_scale = self.resized_width / self.width, self.resized_height / self.height
        return box._replace(
            x0=box.x0 * x_scale + self.left,
            y0=box.y0 * y_scale + self.top,
            x1=box.x1 * x_scale + self.left,
            y1=box.y1 * y_scale + self.top,
        )

    def to_picture(self, box: PlainBox) -> PlainBox:
        """The box in the picture's pixels, clipped to the picture."""
        x_scale, y_scale = self.resized_width / self.width, self.resized_height / self.height
        return box._replace(
            x0=min(max((box.x0 - self.left) / x_scale, 0.0), self.width),
            y0=min(max((box.y0 - self.top) / y_scale, 0.0), self.height),
            x1=min(max((box.x1 - self.left) / x_scale, 0.0), self.width),
            y1=min(max((box.y1 - self.top) / y_scale, 0.0), self.height),
        )

    def resize(self, picture: Array, pad: int) -> Array:
        """The picture (height, width, 3) uint8 as the network sees it: (network_height, network_width, 3) uint8."""
        canvas = np.full((self.network_height, self.network_width, 3), pad, np.uint8)
        resized = cv2.resize(picture, (self.resized_width, self.resized_height), interpolation=cv2.INTER_LINEAR)
        canvas[self.top : self.top + self.resized_height, self.left : self.left + self.resized_width] = resized
        return canvas


def letterbox(width: int, height: int, network_width: int, network_height: int) -> PlainFit:
    """Aspect ratio kept, centred, as Ultralytics does it."""
    ratio = min(network_height / height, network_width / width)
    resized_width, resized_height = round(width * ratio), round(height * ratio)
    left = round((network_width - resized_width) / 2 - 0.1)
    top = round((network_height - resized_height) / 2 - 0.1)
    return PlainFit(width, height, resized_width, resized_height, left, top, network_width, network_height)


def corner(width: int, height: int, network_width: int, network_height: int) -> PlainFit:
    """Aspect ratio kept, at the top left, as YOLOX does it."""
    ratio = min(network_height / height, network_width / width)
    return PlainFit(width, height, int(width * ratio), int(height * ratio), 0, 0, network_width, network_height)


def squash(width: int, height: int, network_width: int, network_height: int) -> PlainFit:
    """Stretched to the network's size."""
    return PlainFit(width, height, network_width, network_height, 0, 0, network_width, network_height)


def plain_iou(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes, which start with x0, y0, x1, y1; 0 if both are empty."""
    width = max(min(one[2], other[2]) - max(one[0], other[0]), 0.0)
    height = max(min(one[3], other[3]) - max(one[1], other[1]), 0.0)
    union = (one[2] - one[0]) * (one[3] - one[1]) + (other[2] - other[0]) * (other[3] - other[1]) - width * height
    return width * height / union if union > 0 else 0.0


def plain_nms(boxes: Sequence[PlainBox], iou: float = 0.45, *, is_class_agnostic: bool = False) -> list[PlainBox]:
    """Greedy suppression, per class unless is_class_agnostic; by falling score."""
    selected: list[PlainBox] = []
    for box in sorted(boxes, key=lambda one: -one.score):
        rivals = [one for one in selected if is_class_agnostic or one.class_id == box.class_id]
        if all(plain_iou(one, box) <= iou for one in rivals):
            selected.append(box)
    return selected


def assert_same_detections(found: Detections, wanted: Sequence[PlainBox]) -> None:
    """The same number, by falling score; each with its class, an IoU of 0.99 or more, and its score within 1e-3."""
    assert found.score.tolist() == sorted(found.score.tolist(), reverse=True)
    rows = zip(found.xyxy.tolist(), found.class_id.tolist(), found.score.tolist(), strict=True)
    left = [PlainBox(*map(float, xyxy), class_id, score) for xyxy, class_id, score in rows]
    assert len(left) == len(wanted), f"{len(left)} detections, {len(wanted)} wanted: {left}"
    for box in wanted:
        same = [
            one
            for one in left
            if one.class_id == box.class_id
            and abs(one.score - box.score) <= SCORE_TOLERANCE
            and plain_iou(one, box) >= LEAST_IOU
        ]
        assert same, f"no detection like {box} among {left}"
        left.remove(same[0])
