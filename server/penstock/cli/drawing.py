"""Draws results into a picture: boxes with legible captions, or the top classes in a corner."""

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
        return max(1, round(self.scale * 1.5))

    @property
    def margin(self) -> int:
        return max(2, round(4 * self.scale))

    @property
    def descent(self) -> int:
        return int(cv2.getTextSize(TALLEST_TEXT, FONT, self.scale, self.weight)[1])

    def size(self, text: str) -> tuple[int, int]:
        """Width and height of the text with its margin; the height is the same for every text."""
        (width, _), _ = cv2.getTextSize(text, FONT, self.scale, self.weight)
        (_, ascent), descent = cv2.getTextSize(TALLEST_TEXT, FONT, self.scale, self.weight)
        return width + 2 * self.margin, ascent + descent + 2 * self.margin

    def position(self, picture: Picture, text: str, left: int, top: int) -> CaptionPosition:
        """There, or where it is wholly in the picture."""
        width, height = self.size(text)
        left = max(0, min(left, picture.shape[1] - width))
        top = max(0, min(top, picture.shape[0] - height))
        return CaptionPosition(left, top, left + width, top + height)


def lettering_of(picture: Picture) -> Lettering:
    """As large to the eye in any picture."""
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
    """What suits the box, and the smallest."""
    full = lettering_of(picture)
    width, _ = full.size(box.caption)
    share = LONGEST_CAPTION * (box.xyxy[2] - box.xyxy[0]) / width
    shares = (min(1.0, max(SMALLEST_SHARE, share)), SMALLEST_SHARE)
    return Lettering(full.scale * shares[0]), Lettering(full.scale * shares[1])


def _candidates(picture: Picture, box: CaptionedBox, lettering: Lettering) -> list[CaptionPosition]:
    """The better ones first: above the box, below it, and inside its upper edge where that hides little of it.

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
    """(n,): square pixels that the place and each rectangle have in common."""
    upper = np.maximum(rectangles[:, :2], (position.left, position.top))
    lower = np.minimum(rectangles[:, 2:], (position.right, position.bottom))
    return np.asarray(np.prod(np.maximum(lower - upper, 0.0), axis=1), np.float64)


Color = tuple[int, int, int]

# BGR, far apart from their neighbours in hue; bright enough for a dark caption, all of them
PALETTE: tuple[Color, ...] = (
    (80, 220, 60),
    (60, 180, 255),
    (255, 190, 60),
    (190, 130, 255),
    (60, 240, 250),
    (255, 170, 210),
    (220, 230, 60),
    (110, 140, 255),
)
INK: Color = (20, 20, 20)


def draw_boxes(picture: Picture, boxes: Sequence[CaptionedBox]) -> Picture:
    """A copy of the picture, (H, W, 3) BGR, with the boxes, the first on top; captions where they hide no other box.

    A small box has a small caption. One that would hide another box or an earlier box's caption is left out.
    """
    drawn = picture.copy()
    for box in reversed(boxes):
        corners = [round(value) for value in box.xyxy]
        cv2.rectangle(drawn, corners[:2], corners[2:], _color(box.class_id), _line_width(picture), cv2.LINE_AA)
    for box, placed in zip(boxes, position_captions(picture, boxes), strict=True):
        if placed is not None:
            _draw_text(drawn, box.caption, *placed, background=_color(box.class_id))
    return drawn


def draw_lines(picture: Picture, lines: Sequence[str]) -> Picture:
    """A copy of the picture with the lines of text in its upper left corner, each on a colour of its own."""
    drawn, lettering = picture.copy(), lettering_of(picture)
    top = 0
    for number, line in enumerate(lines):
        position = lettering.position(drawn, line, 0, top)
        _draw_text(drawn, line, lettering, position, background=_color(number))
        top = position.bottom
    return drawn


def _color(class_id: int) -> Color:
    """Of the palette, turned by one every round, so that classes 0, 8, 16 and 32 differ as well."""
    return PALETTE[(class_id + class_id // len(PALETTE)) % len(PALETTE)]


def _line_width(picture: Picture) -> int:
    """2 pixels in a VGA picture, more in a larger one, so that it is as wide to the eye."""
    return max(2, round(_longest_side(picture) / 500))


def _longest_side(picture: Picture) -> int:
    height, width, _ = picture.shape
    return int(max(height, width))


def _draw_text(
    drawn: Picture, text: str, lettering: Lettering, position: CaptionPosition, *, background: Color
) -> None:
    """Dark text on a filled background."""
    cv2.rectangle(
        drawn, (position.left, position.top), (position.right - 1, position.bottom - 1), background, cv2.FILLED
    )
    origin = (position.left + lettering.margin, position.bottom - lettering.margin - lettering.descent)
    cv2.putText(drawn, text, origin, FONT, lettering.scale, INK, lettering.weight, cv2.LINE_AA)
