"""Results drawn into a picture: boxes with captions, or the likely classes in a corner."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]
Color = tuple[int, int, int]

FONT = cv2.FONT_HERSHEY_SIMPLEX
TALLEST_TEXT = "Ågjy"
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


@dataclass(frozen=True, slots=True)
class CaptionedBox:
    """xyxy: corners in the picture's pixels. class_id: boxes of one class share a colour."""

    xyxy: tuple[float, float, float, float]
    caption: str
    class_id: int


def draw_boxes(picture: Picture, boxes: Sequence[CaptionedBox]) -> Picture:
    """A copy of the picture, (H, W, 3) BGR, with the boxes; the first box's caption lies on top."""
    drawn = picture.copy()
    for box in reversed(boxes):
        corners = [round(value) for value in box.xyxy]
        cv2.rectangle(drawn, corners[:2], corners[2:], _color(box.class_id), _line_width(picture), cv2.LINE_AA)
    for box in reversed(boxes):
        _draw_caption(drawn, box)
    return drawn


def draw_lines(picture: Picture, lines: Sequence[str]) -> Picture:
    """A copy of the picture with the lines of text in its upper left corner, each on a colour of its own."""
    drawn = picture.copy()
    top = 0
    for number, line in enumerate(lines):
        top += _draw_text(drawn, line, left=0, top=top, background=_color(number))
    return drawn


def _color(class_id: int) -> Color:
    """Of the palette, turned by one every round, so that classes 0, 8, 16 and 32 differ as well."""
    return PALETTE[(class_id + class_id // len(PALETTE)) % len(PALETTE)]


def _line_width(picture: Picture) -> int:
    """2 pixels in a VGA picture, more in a larger one, so that it is as wide to the eye."""
    return max(2, round(_longest_side(picture) / 500))


def _text_scale(picture: Picture) -> float:
    return max(0.5, _longest_side(picture) / 1600)


def _longest_side(picture: Picture) -> int:
    height, width, _ = picture.shape
    return int(max(height, width))


def _draw_caption(drawn: Picture, box: CaptionedBox) -> None:
    """Above the box where there is room, else inside its upper edge; always within the picture."""
    _, height = _text_size(drawn, box.caption)
    left, top = round(box.xyxy[0]), round(box.xyxy[1])
    above = top - height
    _draw_text(drawn, box.caption, left=left, top=above if above >= 0 else top, background=_color(box.class_id))


def _draw_text(drawn: Picture, text: str, *, left: int, top: int, background: Color) -> int:
    """Draws dark text on a filled background and returns the background's height."""
    width, height = _text_size(drawn, text)
    left = max(0, min(left, drawn.shape[1] - width))
    top = max(0, min(top, drawn.shape[0] - height))
    scale, weight = _text_scale(drawn), _text_weight(drawn)
    margin = _margin(drawn)
    _, descent = cv2.getTextSize(TALLEST_TEXT, FONT, scale, weight)
    cv2.rectangle(drawn, (left, top), (left + width - 1, top + height - 1), background, cv2.FILLED)
    origin = (left + margin, top + height - margin - descent)
    cv2.putText(drawn, text, origin, FONT, scale, INK, weight, cv2.LINE_AA)
    return height


def _text_size(picture: Picture, text: str) -> tuple[int, int]:
    """Width and height of the text with its margin; the height is the same for every text."""
    scale, weight = _text_scale(picture), _text_weight(picture)
    (width, _), _ = cv2.getTextSize(text, FONT, scale, weight)
    (_, ascent), descent = cv2.getTextSize(TALLEST_TEXT, FONT, scale, weight)
    return width + 2 * _margin(picture), ascent + descent + 2 * _margin(picture)


def _text_weight(picture: Picture) -> int:
    return max(1, round(_text_scale(picture) * 1.5))


def _margin(picture: Picture) -> int:
    return max(2, round(4 * _text_scale(picture)))
