"""Captions of boxes in a picture: their size and position, so that none hides another box, and their text."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]
Rectangles = npt.NDArray[np.float64]  # (n, 4): x1 y1 x2 y2

FONT = cv2.FONT_HERSHEY_SIMPLEX
TALLEST_TEXT = "Ågjy"
SMALLEST_SHARE = 0.7  # of the picture's font scale; smaller captions are illegible in a VGA picture
LONGEST_CAPTION = 1.5  # of its box's width, before it is made smaller
HIDDEN_SHARE = 0.1  # of another box, which a caption may lie over: a person's before a car, a neighbour's edge
ROOMY = 4  # captions in a box's height, from which on one inside its upper edge hides little of it


@dataclass(frozen=True, slots=True)
class CaptionedBox:
    """xyxy: corners in the picture's pixels. class_id: boxes of one class share a colour."""

    xyxy: tuple[float, float, float, float]
    caption: str
    class_id: int


@dataclass(frozen=True, slots=True)
class CaptionPosition:
    """Pixels of the picture; right and bottom are the first that are not covered."""

    left: int
    top: int
    right: int
    bottom: int


@dataclass(frozen=True, slots=True)
class Lettering:
    """scale: of OpenCV's font."""

    scale: float

    @property
    def weight(self) -> int:
        """Line width of the font in pixels."""
        return max(1, round(self.scale * 1.5))

    @property
    def margin(self) -> int:
        """Pixels around the text."""
        return max(2, round(4 * self.scale))

    @property
    def descent(self) -> int:
        """Pixels below the baseline."""
        return int(cv2.getTextSize(TALLEST_TEXT, FONT, self.scale, self.weight)[1])

    def size(self, text: str) -> tuple[int, int]:
        """Width and height of the text with its margin; the height is the same for every text."""
        (width, _), _ = cv2.getTextSize(text, FONT, self.scale, self.weight)
        (_, ascent), descent = cv2.getTextSize(TALLEST_TEXT, FONT, self.scale, self.weight)
        return width + 2 * self.margin, ascent + descent + 2 * self.margin

    def position(self, picture: Picture, text: str, left: int, top: int) -> CaptionPosition:
        """The position at (left, top), moved so that the text is inside the picture."""
        width, height = self.size(text)
        left = max(0, min(left, picture.shape[1] - width))
        top = max(0, min(top, picture.shape[0] - height))
        return CaptionPosition(left, top, left + width, top + height)


def lettering_of(picture: Picture) -> Lettering:
    """The font scale for the picture's size."""
    return Lettering(max(0.5, max(picture.shape[:2]) / 1600))


def position_captions(
    picture: Picture, boxes: Sequence[CaptionedBox]
) -> list[tuple[Lettering, CaptionPosition] | None]:
    """Font and position of each box's caption, or None if it would hide another box; earlier boxes first."""
    rectangles = np.array([box.xyxy for box in boxes], np.float64).reshape(-1, 4)
    captions: list[CaptionPosition] = []
    placed: list[tuple[Lettering, CaptionPosition] | None] = []
    for number, box in enumerate(boxes):
        others = np.delete(rectangles, number, axis=0)
        tried = (
            (lettering, position)
            for lettering in _letterings(picture, box)
            for position in _candidates(picture, box, lettering)
            if not _hides(position, others, captions)
        )
        found = next(tried, None)
        placed.append(found)
        captions += [found[1]] if found is not None else []
    return placed


def _letterings(picture: Picture, box: CaptionedBox) -> tuple[Lettering, Lettering]:
    """The size that fits the box, and the smallest."""
    full = lettering_of(picture)
    width, _ = full.size(box.caption)
    share = LONGEST_CAPTION * (box.xyxy[2] - box.xyxy[0]) / width
    shares = (min(1.0, max(SMALLEST_SHARE, share)), SMALLEST_SHARE)
    return Lettering(full.scale * shares[0]), Lettering(full.scale * shares[1])


def _candidates(picture: Picture, box: CaptionedBox, lettering: Lettering) -> list[CaptionPosition]:
    """Candidate positions, best first: above the box, below it, and inside its upper edge if that hides little of it.

    Inside a small box too where the picture has no room outside.
    """
    left, upper, _, lower = map(round, box.xyxy)
    _, height = lettering.size(box.caption)
    above = [upper - height] if upper >= height else []
    below = [lower + 1] if lower + 1 + height <= picture.shape[0] else []
    is_roomy = lower - upper >= ROOMY * height
    tops = [*above, upper, *below] if is_roomy else [*above, *below] or [upper]
    return [lettering.position(picture, box.caption, left, top) for top in tops]


def _hides(position: CaptionPosition, others: Rectangles, captions: Sequence[CaptionPosition]) -> bool:
    """Whether much of any other box, or any of a caption, lies below it."""
    taken = np.array([(one.left, one.top, one.right, one.bottom) for one in captions], np.float64).reshape(-1, 4)
    areas = np.prod(np.maximum(others[:, 2:] - others[:, :2], 1.0), axis=1)
    return bool((_covered(position, others) > HIDDEN_SHARE * areas).any() or _covered(position, taken).any())


def _covered(position: CaptionPosition, rectangles: Rectangles) -> Rectangles:
    """(n,): intersection areas of the position and each rectangle, in pixels."""
    upper = np.maximum(rectangles[:, :2], (position.left, position.top))
    lower = np.minimum(rectangles[:, 2:], (position.right, position.bottom))
    return np.asarray(np.prod(np.maximum(lower - upper, 0.0), axis=1), np.float64)


Color = tuple[int, int, int]  # blue, green, red
INK: Color = (20, 20, 20)


def drawable(text: str) -> str:
    """The text without control characters, which have no glyph."""
    return "".join(one if one.isprintable() else "?" for one in text)


def draw_caption(
    picture: Picture, text: str, lettering: Lettering, position: CaptionPosition, *, background: Color
) -> None:
    """Dark text on a filled background. text: drawable."""
    corners = (position.left, position.top), (position.right - 1, position.bottom - 1)
    cv2.rectangle(picture, *corners, background, cv2.FILLED)
    origin = (position.left + lettering.margin, position.bottom - lettering.margin - lettering.descent)
    cv2.putText(picture, text, origin, FONT, lettering.scale, INK, lettering.weight, cv2.LINE_AA)
