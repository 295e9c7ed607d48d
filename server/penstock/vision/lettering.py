"""Text and lines in pictures: their size follows the picture's, and text has a plate as its background."""

import threading
from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
import numpy.typing as npt

from penstock.vision.palette import Color, ink_on

Picture = npt.NDArray[np.uint8]  # (height, width, 3)

MIN_TEXT_PX = 12
_NARROW = 0.75  # of the height: in a narrower picture, sizes follow its width
_WEIGHT = 600  # of the font: semibold
_UNLIMITED = (1 << 14, 1 << 14)
_DIGITS = str.maketrans(dict.fromkeys("123456789", "0"))  # all are equally wide, so that few texts are measured

_fonts = threading.local()


def text_px_of(width: int, height: int) -> int:
    """Font size in pixels for a picture of this size: 15 of 480p, 30 of 1080p, 55 of 2160p."""
    return max(MIN_TEXT_PX, round(4 + _side(width, height) / 42))


def line_px_of(width: int, height: int) -> int:
    """Line width in pixels for a picture of this size: 2 of 480p, 4 of 1080p, 8 of 2160p."""
    return max(1, round(0.6 + _side(width, height) / 300))


def _side(width: int, height: int) -> float:
    return min(height, width * _NARROW)


def drawable(text: str) -> str:
    """The text without control characters, which have no glyph."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


@dataclass(frozen=True, slots=True)
class Lettering:
    """text_px: the font's size in pixels; capital letters have 70 % of it."""

    text_px: int

    @property
    def margin(self) -> int:
        """Pixels between the text and the edge of its plate."""
        return max(2, self.text_px // 4)

    @property
    def height(self) -> int:
        """Height of a plate in pixels, the same for every text."""
        return round(self.text_px * 1.2) + self.margin

    def width(self, text: str) -> int:
        """Width in pixels of the plate of the text."""
        return _text_width(text.translate(_DIGITS), self.text_px) + 2 * self.margin

    def fitted(self, text: str, most_px: int) -> str:
        """The text, or its beginning with an ellipsis, so that its plate is at most this wide."""
        if self.width(text) <= most_px:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.width(f"{text[:middle]}…") <= most_px else (low, middle - 1)
        return f"{text[:low].rstrip()}…" if low else ""

    def plate(
        self, picture: Picture, text: str, at: tuple[int, int], color: Color, *, width: int = 0, strength: float = 1.0
    ) -> None:
        """Draws text on a plate, within the picture. The channels of color are in the picture's order.

        at: upper left corner of the plate. width: of the plate if it is known. strength: 1 hides what is below it.
        """
        left, top = at
        right, bottom = left + (width or self.width(text)), top + self.height
        if strength >= 1:
            cv2.rectangle(picture, at, (right - 1, bottom - 1), color, cv2.FILLED)
        else:
            ground = picture[top:bottom, left:right]
            ground[:] = mixed(ground, color, strength)
        baseline = (left + self.margin, top + self.margin // 2 + round(self.text_px * 0.92))
        cv2.putText(picture, text, baseline, ink_on(color), _font(), self.text_px, _WEIGHT)


def mixed(part: Picture, color: Color, strength: float) -> Picture:
    """The part of a picture, with this share of the colour."""
    darker = cv2.convertScaleAbs(part, alpha=1 - strength)
    result: Picture = cv2.add(darker, (*(channel * strength for channel in color), 0.0))
    return result


@lru_cache(maxsize=4096)
def _text_width(text: str, text_px: int) -> int:
    _, _, width, _ = cv2.getTextSize(_UNLIMITED, text, (0, 0), _font(), text_px, _WEIGHT)
    return int(width)


def _font() -> "cv2.FontFace":
    """This thread's font: OpenCV draws wrong letters if threads share one."""
    if not hasattr(_fonts, "font"):
        _fonts.font = cv2.FontFace("sans")
    font: cv2.FontFace = _fonts.font
    return font
