"""Drawing primitives on a picture, and label positions that do not overlap."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from penstock.protocol.vision_results import Mask
from penstock.vision.drawing import MIN_KEYPOINT_SCORE
from penstock.vision.lettering import Lettering, line_px_of, mixed, text_px_of
from penstock.vision.palette import INK, Color
from penstock_video.types import ByteArray

Pixel = tuple[int, int]
Points = Sequence[Pixel] | npt.NDArray[np.int32]


class Canvas:
    """Draws into the given picture, (H, W, 3) RGB. lettering: of its text; line_px: line width."""

    def __init__(self, picture: ByteArray) -> None:
        self.picture = picture
        self.height, self.width = picture.shape[:2]
        self.lettering = Lettering(text_px_of(self.width, self.height))
        self.line_px = line_px_of(self.width, self.height)
        self._edge_px = 2 * max(1, self.line_px // 3) if self.line_px > 1 else 0  # by which a dark edge widens a line

    def pixel(self, x: float, y: float) -> Pixel:
        """The nearest pixel, clipped near the picture."""
        bound = 4 * max(self.width, self.height)
        return round(min(max(x, -bound), bound)), round(min(max(y, -bound), bound))

    def pixels(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
        """The nearest pixels to (n, 2) points, without non-finite ones."""
        bound = 4 * max(self.width, self.height)
        finite = points[np.isfinite(points).all(axis=1)]
        return np.rint(np.clip(finite, -bound, bound)).astype(np.int32)

    def box(self, first: Pixel, second: Pixel, color: Color) -> None:
        """A rectangle between two corners, with a dark edge if there is room."""
        if self._edge_px:
            cv2.rectangle(self.picture, first, second, INK, self.line_px + self._edge_px)
        cv2.rectangle(self.picture, first, second, color, self.line_px)

    def polyline(self, points: Points, color: Color, *, width_px: int = 0, is_closed: bool = False) -> None:
        """A line through the points, with a dark edge if there is room."""
        array, width_px = np.asarray(points, np.int32).reshape(-1, 1, 2), width_px or self.line_px
        if self._edge_px:
            cv2.polylines(self.picture, [array], is_closed, INK, width_px + self._edge_px)
        cv2.polylines(self.picture, [array], is_closed, color, width_px, cv2.LINE_AA)

    def arrow(self, tail: Pixel, head: Pixel, color: Color) -> None:
        """An arrow with a head of constant size and a dark edge."""
        length = math.dist(tail, head)
        if length < 1:
            return
        size, width_px = self.lettering.text_px * 0.8, self.line_px + 1
        along = (head[0] - tail[0]) / length, (head[1] - tail[1]) / length
        base = head[0] - along[0] * size, head[1] - along[1] * size
        wings = [(round(base[0] + side * along[1]), round(base[1] - side * along[0])) for side in (size / 2, -size / 2)]
        tip = np.array([wings[0], head, wings[1]], np.int32)
        self.polyline([tail, (round(base[0]), round(base[1]))], color, width_px=width_px)
        cv2.polylines(self.picture, [tip], True, INK, 2 + self._edge_px)
        cv2.fillPoly(self.picture, [tip], color, cv2.LINE_AA)

    def tint(self, polygon: list[Pixel], color: Color, strength: float) -> None:
        """Mixes the colour into a polygon."""
        array = np.array(polygon, np.int32)
        left, top = np.maximum(array.min(axis=0), 0).tolist()
        right, bottom = np.minimum(array.max(axis=0) + 1, (self.width, self.height)).tolist()
        if left >= right or top >= bottom:
            return
        part = self.picture[top:bottom, left:right]
        filled = part.copy()
        cv2.fillPoly(filled, [array], color, offset=(-left, -top))
        cv2.addWeighted(part, 1 - strength, filled, strength, 0.0, dst=part)

    def tint_mask(self, mask: Mask, scale: float, color: Color, strength: float) -> None:
        """Tints an object's pixels. scale: pixels of this picture per pixel of the mask's."""
        if not mask.bits.size:
            return
        left, top = round(mask.left * scale), round(mask.top * scale)
        height, width = (max(round(side * scale), 1) for side in mask.bits.shape)
        bits = cv2.resize(mask.bits.astype(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST)
        part = self.picture[top : top + height, left : left + width]
        if part.size:
            cv2.copyTo(mixed(part, color, strength), bits[: part.shape[0], : part.shape[1]], part)

    def outline(self, corners: npt.NDArray[np.float64], color: Color) -> None:
        """A polygon (n, 2), with a dark edge if there is room."""
        points = self._bounded(corners)
        self.polyline(points, color, is_closed=True)

    def keypoints(self, keypoints: npt.NDArray[np.float64], skeleton: Sequence[tuple[int, int]], color: Color) -> None:
        """Draws the visible ones of (k, 3) keypoints, x and y in pixels, joined by the skeleton."""
        points = self._bounded(keypoints[:, :2]).tolist()
        is_seen = (keypoints[:, 2] >= MIN_KEYPOINT_SCORE).tolist()
        for one, other in skeleton:
            if max(one, other) < len(points) and is_seen[one] and is_seen[other]:
                self.polyline([points[one], points[other]], color)
        for point, is_drawn in zip(points, is_seen, strict=True):
            if is_drawn:
                cv2.circle(self.picture, point, self.line_px + 2 + self._edge_px, INK, cv2.FILLED, cv2.LINE_AA)
                cv2.circle(self.picture, point, self.line_px + 2, color, cv2.FILLED, cv2.LINE_AA)

    def _bounded(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
        bound = 4 * max(self.width, self.height)
        return np.rint(np.clip(np.nan_to_num(points), -bound, bound)).astype(np.int32)

    def plate(self, text: str, at: Pixel, color: Color, *, width: int = 0, strength: float = 1.0) -> None:
        """Text on a plate of this colour; `at` is its upper left corner, moved into the picture. width: if known."""
        width = width or self.lettering.width(text)
        left = max(0, min(at[0], self.width - width))
        top = max(0, min(at[1], self.height - self.lettering.height))
        self.lettering.plate(self.picture, text, (left, top), color, width=width, strength=strength)


Box = tuple[Pixel, Pixel]  # upper left and lower right corner
Side = tuple[str, str]  # of a box: above or below it, from its left or its right edge
_MOST_INNER = 6  # tried positions further down inside a box
_MOST_NEAR = 16  # other boxes that a label should not cover
_MOST_TRIED = 64  # boxes to the right of one that are checked for that
_LITTLE = 0.1  # of a label: covering the edge of another box by this hides no object


class LabelPosition(NamedTuple):
    """at: upper left corner. side: None inside the box or without room beside it."""

    at: Pixel
    side: Side | None


class LabelLayout:
    """Positions of labels of equal height in a picture; earlier requests get better ones."""

    def __init__(self, picture: tuple[int, int], height: int) -> None:
        self._picture = picture
        self.height = max(height, 1)
        # (left, top, right) of labels by band of a label's height: a label overlaps its band and the two beside it.
        self._taken: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def take(
        self, box: Box, width: int, others: Sequence[Box] = (), *, former: Side | None = None
    ) -> LabelPosition | None:
        """A position for a label at the box, or None if each would cover another label.

        former: its side in the last picture, kept if possible.
        Tried in order: above the box, below it, inside at its top, further down inside; at its left edge, then its
        right. The first that covers no other box is used, else the one that covers least.
        """
        best, least = None, float("inf")
        little = _LITTLE * width * self.height
        kept = (place for place in self._places(box, width) if place.side == former) if former else ()
        for place in chain(kept, self._places(box, width)):
            if not self._is_free(place.at, width):
                continue
            covered = self._covered(place.at, width, others, least)
            if covered < least:
                best, least = place, covered
            if covered <= little:
                break
        if best is not None:
            self.keep_free(best.at, width)
        return best

    def keep_free(self, place: Pixel, width: int) -> None:
        """Reserves an area of this width and a label's height."""
        (left, top), band = place, place[1] // self.height
        for near in (band - 1, band, band + 1):
            self._taken[near].append((left, top, left + width))

    def _is_free(self, place: Pixel, width: int) -> bool:
        (left, top), height = place, self.height
        right = left + width
        for its_left, its_top, its_right in self._taken.get(top // height, ()):
            if its_left < right and left < its_right and -height < its_top - top < height:
                return False
        return True

    def _covered(self, place: Pixel, width: int, others: Sequence[Box], enough: float) -> int:
        """Pixels of other boxes under a label there; stops counting above `enough`."""
        (left, top), covered = place, 0
        right, bottom = left + width, top + self.height
        for (its_left, its_top), (its_right, its_bottom) in others:
            across = min(right, its_right) - max(left, its_left)
            down = min(bottom, its_bottom) - max(top, its_top)
            if across > 0 and down > 0:
                covered += across * down
                if covered >= enough:
                    break
        return covered

    def _places(self, box: Box, width: int) -> Iterator[LabelPosition]:
        ((left, top), (right, bottom)), height = box, self.height
        most_left, most_top = max(self._picture[0] - width, 0), max(self._picture[1] - height, 0)
        rows = [("above", top - height)] if top >= height else []
        rows += [("below", bottom), *(("", y) for y in range(top, bottom - height, height)[: _MOST_INNER + 1])]
        for row, y in rows:
            for edge, x in (("left", left), ("right", right - width)):
                at = min(max(x, 0), most_left), min(max(y, 0), most_top)
                yield LabelPosition(at, (row, edge) if row and y == at[1] else None)


def neighbours(boxes: Sequence[Box], width: int, height: int) -> list[list[Box]]:
    """For each box, other boxes that its label could cover; a limited number in a dense crowd."""
    order = sorted(range(len(boxes)), key=lambda index: boxes[index][0][0])
    near: list[list[Box]] = [[] for _ in boxes]
    for rank, one in enumerate(order, 1):
        (_, top), (right, bottom) = boxes[one]
        for other in order[rank : rank + _MOST_TRIED]:
            (its_left, its_top), (_, its_bottom) = boxes[other]
            if its_left >= right + width:
                break
            if its_top < bottom + height and top < its_bottom + height:
                near[one].append(boxes[other])
                near[other].append(boxes[one])
    return [some[:_MOST_NEAR] for some in near]
