"""Captions of boxes in a picture: their size and position, so that none hides another box, and their text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.vision.lettering import MIN_TEXT_PX, Lettering, Picture, text_px_of

Rectangles = npt.NDArray[np.float64]  # (n, 4): x1 y1 x2 y2

SMALLEST_SHARE = 0.8  # of the picture's font size
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


def lettering_of(picture: Picture) -> Lettering:
    """The font size for the picture's size."""
    return Lettering(text_px_of(picture.shape[1], picture.shape[0]))


def position_of(picture: Picture, lettering: Lettering, text: str, left: int, top: int) -> CaptionPosition:
    """The position at (left, top), moved so that the text is inside the picture."""
    width, height = lettering.width(text), lettering.height
    left = max(0, min(left, picture.shape[1] - width))
    top = max(0, min(top, picture.shape[0] - height))
    return CaptionPosition(left, top, left + width, top + height)


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
    share = LONGEST_CAPTION * (box.xyxy[2] - box.xyxy[0]) / full.width(box.caption)
    smallest = min(full.text_px, max(MIN_TEXT_PX, round(full.text_px * SMALLEST_SHARE)))
    return Lettering(min(full.text_px, max(smallest, round(full.text_px * share)))), Lettering(smallest)


def _candidates(picture: Picture, box: CaptionedBox, lettering: Lettering) -> list[CaptionPosition]:
    """Candidate positions, best first: above the box, below it, and inside its upper edge if that hides little of it.

    Inside a small box too where the picture has no room outside.
    """
    left, upper, _, lower = map(round, box.xyxy)
    height = lettering.height
    above = [upper - height] if upper >= height else []
    below = [lower + 1] if lower + 1 + height <= picture.shape[0] else []
    is_roomy = lower - upper >= ROOMY * height
    tops = [*above, upper, *below] if is_roomy else [*above, *below] or [upper]
    return [position_of(picture, lettering, box.caption, left, top) for top in tops]


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
