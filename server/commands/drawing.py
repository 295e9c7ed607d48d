"""Results drawn into a picture: boxes with captions, or the likely classes in a corner."""

from collections.abc import Sequence

import cv2

from server.commands.captions import FONT, CaptionedBox, Lettering, Picture, Place, lettering_of, place_captions

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
    for box, placed in zip(boxes, place_captions(picture, boxes), strict=True):
        if placed is not None:
            _draw_text(drawn, box.caption, *placed, background=_color(box.class_id))
    return drawn


def draw_lines(picture: Picture, lines: Sequence[str]) -> Picture:
    """A copy of the picture with the lines of text in its upper left corner, each on a colour of its own."""
    drawn, lettering = picture.copy(), lettering_of(picture)
    top = 0
    for number, line in enumerate(lines):
        place = lettering.place(drawn, line, 0, top)
        _draw_text(drawn, line, lettering, place, background=_color(number))
        top = place.bottom
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


def _draw_text(drawn: Picture, text: str, lettering: Lettering, place: Place, *, background: Color) -> None:
    """Dark text on a filled background."""
    cv2.rectangle(drawn, (place.left, place.top), (place.right - 1, place.bottom - 1), background, cv2.FILLED)
    origin = (place.left + lettering.margin, place.bottom - lettering.margin - lettering.descent)
    cv2.putText(drawn, text, origin, FONT, lettering.scale, INK, lettering.weight, cv2.LINE_AA)
