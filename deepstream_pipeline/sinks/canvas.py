"""A picture that is drawn on: boxes, chips of text, regions, arrows, in sizes that fit it; in its own pixels."""

import colorsys
import math
from collections.abc import Sequence
from functools import cache

import cv2
import numpy as np
import numpy.typing as npt

from deepstream_pipeline.types import ByteArray

Colour = tuple[int, int, int]  # RGB
Pixel = tuple[int, int]
Points = Sequence[Pixel] | npt.NDArray[np.int32]

WHITE: Colour = (255, 255, 255)
INK: Colour = (22, 24, 28)
ALARM: Colour = (235, 64, 52)
_TONES = ((0.75, 0.98), (0.35, 1.0), (0.9, 0.6))  # saturation, value: strong, pale, dark; in turn
_COLOURS, _HUE_STEP = 33, 10 / 33  # eleven hues of each: after a golden ratio hues come back near 8, 13 and 21 later
_MIN_TEXT_PX = 11
_WEIGHT = 600  # of the letters: semibold


def colour_of(number: int) -> Colour:
    """The same colour for the same number; any 33 numbers in a row have clearly different ones."""
    return _colour(number % _COLOURS)


@cache
def _colour(number: int) -> Colour:
    hue = (0.55 + number * _HUE_STEP) % 1.0
    saturation, value = _TONES[number % len(_TONES)]
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


class Canvas:
    """Draws into the picture that it is given. text_px: the height of its letters; line_px: of its lines."""

    def __init__(self, picture: ByteArray) -> None:
        self.picture = picture
        self.height, self.width = picture.shape[:2]
        size = math.sqrt(self.width * self.height)
        self.text_px = max(_MIN_TEXT_PX, round(6 + size * 0.0145))
        self.line_px = max(1, round(size / 420))
        self._font = _font()

    def pixel(self, x: float, y: float) -> Pixel:
        """The nearest pixel; far outside of the picture it is held near it."""
        bound = 4 * max(self.width, self.height)
        return round(min(max(x, -bound), bound)), round(min(max(y, -bound), bound))

    def pixels(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
        """The nearest pixels to (n, 2) points; those that are not finite are left out."""
        bound = 4 * max(self.width, self.height)
        finite = points[np.isfinite(points).all(axis=1)]
        return np.rint(np.clip(finite, -bound, bound)).astype(np.int32)

    def box(self, first: Pixel, second: Pixel, colour: Colour) -> None:
        """A rectangle between two corners, with a dark edge where there is room for one."""
        if self.line_px > 1:
            cv2.rectangle(self.picture, first, second, INK, self.line_px + 2)
        cv2.rectangle(self.picture, first, second, colour, self.line_px)

    def polyline(self, points: Points, colour: Colour, *, width_px: int = 0, is_closed: bool = False) -> None:
        """Lines from point to point."""
        array = np.asarray(points, np.int32).reshape(-1, 1, 2)
        cv2.polylines(self.picture, [array], is_closed, colour, width_px or self.line_px, cv2.LINE_AA)

    def arrow(self, tail: Pixel, head: Pixel, colour: Colour) -> None:
        """An arrow; its head keeps its size."""
        length = math.dist(tail, head)
        if length >= 1:
            tip = min(0.5, self.text_px * 0.7 / length)
            cv2.arrowedLine(self.picture, tail, head, colour, self.line_px, cv2.LINE_AA, 0, tip)

    def tint(self, polygon: list[Pixel], colour: Colour, strength: float) -> None:
        """Colour the inside of a polygon, so that what is there is seen through it."""
        array = np.array(polygon, np.int32)
        left, top = np.maximum(array.min(axis=0), 0).tolist()
        right, bottom = np.minimum(array.max(axis=0) + 1, (self.width, self.height)).tolist()
        if left >= right or top >= bottom:
            return
        part = self.picture[top:bottom, left:right]
        mask = np.zeros(part.shape[:2], np.uint8)
        cv2.fillPoly(mask, [array], (255,), offset=(-left, -top))
        cv2.copyTo(_mixed(part, colour, strength), mask, part)

    def text_size(self, text: str) -> tuple[int, int]:
        """(width, height) in pixels of the chip that `chip` draws for the text."""
        _, _, width, _ = cv2.getTextSize((self.width, self.height), text, (0, 0), self._font, self.text_px, _WEIGHT)
        return width + self._pad * 2, round(self.text_px * 1.2) + self._pad

    def chip(self, text: str, at: Pixel, colour: Colour, *, strength: float = 1.0) -> None:
        """A line of text on a ground of that colour; `at` is its upper left corner, moved into the picture."""
        width, height = self.text_size(text)
        left = max(0, min(at[0], self.width - width))
        top = max(0, min(at[1], self.height - height))
        right, bottom = min(left + width, self.width), min(top + height, self.height)
        ground = self.picture[top:bottom, left:right]
        if strength >= 1:
            ground[:] = colour
        else:
            ground[:] = _mixed(ground, colour, strength)
        baseline = (left + self._pad, top + self._pad // 2 + round(self.text_px * 0.92))
        ink = INK if _is_light(colour) else WHITE
        cv2.putText(self.picture, text, baseline, ink, self._font, self.text_px, _WEIGHT)

    @property
    def _pad(self) -> int:
        return max(2, self.text_px // 4)


@cache
def _font() -> "cv2.FontFace":
    return cv2.FontFace("sans")


def _mixed(part: ByteArray, colour: Colour, strength: float) -> ByteArray:
    darker = cv2.convertScaleAbs(part, alpha=1 - strength)
    mixed: ByteArray = cv2.add(darker, (*(channel * strength for channel in colour), 0.0))
    return mixed


def _is_light(colour: Colour) -> bool:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue > 125
