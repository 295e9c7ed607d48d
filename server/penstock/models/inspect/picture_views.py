"""Views of the trial's pictures: whole, mirrored, and parts of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from penstock.vision.decode import DecodedImage, Image, decode
from penstock.vision.spec import ColorFormat

_PART = 0.6  # of the picture's sides
_PLACES = ((0, 0), (2, 2), (1, 1), (0, 2), (2, 0), (0, 1), (2, 1), (1, 0), (1, 2))  # in halves of what is left
MOST_PARTS = len(_PLACES)


class Views(Enum):
    """WHOLE: each picture, also mirrored. PARTS: sections of it, which show other details and sizes."""

    WHOLE = auto()
    PARTS = auto()


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture and its name."""

    name: str
    data: bytes


def whole_views(picture: Picture, color: ColorFormat, *, is_mirrored: bool) -> Iterator[DecodedImage]:
    """The picture, and mirrored if wanted. Raises InferenceError."""
    decoded = decode(picture.data, color)
    yield decoded
    if is_mirrored:
        yield replace(decoded, pixels=np.ascontiguousarray(decoded.pixels[:, ::-1]))


def part_views(picture: Picture, color: ColorFormat, count: int) -> Iterator[DecodedImage]:
    """At most MOST_PARTS sections of the picture. Raises InferenceError."""
    pixels = decode(picture.data, color).pixels
    height, width = pixels.shape[:2]
    part_height, part_width = max(1, int(_PART * height)), max(1, int(_PART * width))
    for down, right in _PLACES[:count]:
        top, left = (height - part_height) * down // 2, (width - part_width) * right // 2
        part: Image = pixels[top : top + part_height, left : left + part_width]
        yield DecodedImage(np.ascontiguousarray(part), part_width, part_height)
