"""Where a picture lies in the network's image, and how to walk its pixels: what kernels.py reads of each. Pure.

The rules are those of server/vision/preprocess.py, and tests hold the two together.
"""

import math
import struct
from dataclasses import dataclass, replace
from typing import NamedTuple

from .pictures_spec import Fit, PictureSpec

ROW = struct.Struct("<Qqqq6i2d")  # kernels.py's struct Picture
NO_PICTURE = ROW.pack(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)  # black all over
_ADDRESS = struct.Struct("<Q")
_MOST_SIDES = 8  # of a picture longer than this many of the network's sides only the middle is resized before a crop
# EXIF's orientation: (do rows and columns change places, are stored rows walked backwards, stored columns).
_TURNS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


@dataclass(frozen=True)
class Placement:
    """The part of an upright picture that is resized, to what, and where that lies in the network's image.

    left, top, width, height: of the part, in source pixels. pad_x, pad_y: negative where the network's edge cuts it.
    """

    left: int
    top: int
    width: int
    height: int
    resized_width: int
    resized_height: int
    pad_x: int = 0
    pad_y: int = 0


class Stored(NamedTuple):
    """How a decoder left a picture in memory: uint8, `width` by `height` before its orientation is applied.

    is_planar: (channels, height, width), as nvJPEG; else (height, width, channels), as OpenCV. Without gaps.
    channels: 1 or 3. color: their order, "RGB" or "BGR" ("GRAY" of one).
    """

    width: int
    height: int
    orientation: int
    is_planar: bool
    channels: int
    color: str


@dataclass(frozen=True)
class Walk:
    """One picture's row of the kernel's table but for its address in memory."""

    offset: int
    rest: bytes

    def row(self, address: int) -> bytes:
        """ROW.size bytes. address: of the first stored byte."""
        return _ADDRESS.pack(address + self.offset) + self.rest


def walk(stored: Stored, spec: PictureSpec) -> Walk:
    """How the kernel reads a picture so that it comes out upright, in the network's colour order, where it belongs."""
    swaps, rows_backwards, columns_backwards = _TURNS[stored.orientation]
    column_step = 1 if stored.is_planar else stored.channels
    row_step = stored.width * column_step
    channel_step = stored.width * stored.height if stored.is_planar else 1
    offset = 0
    if rows_backwards:
        offset, row_step = offset + (stored.height - 1) * row_step, -row_step
    if columns_backwards:
        offset, column_step = offset + (stored.width - 1) * column_step, -column_step
    if stored.channels > 1 and stored.color != spec.color:
        offset, channel_step = offset + (stored.channels - 1) * channel_step, -channel_step
    if swaps:
        row_step, column_step = column_step, row_step
    width, height = (stored.height, stored.width) if swaps else (stored.width, stored.height)
    part = place(width, height, spec)
    packed = ROW.pack(
        0,
        channel_step,
        row_step,
        column_step,
        part.width,
        part.height,
        part.resized_width,
        part.resized_height,
        part.pad_x,
        part.pad_y,
        1.0 / (part.resized_width / part.width),  # as OpenCV computes it
        1.0 / (part.resized_height / part.height),
    )
    return Walk(offset + part.top * row_step + part.left * column_step, packed[_ADDRESS.size :])


def place(width: int, height: int, spec: PictureSpec) -> Placement:
    """Of an upright picture of that size."""
    if spec.fit is Fit.STRETCH:
        return Placement(0, 0, width, height, spec.width, spec.height)
    if spec.fit is Fit.CROP:
        scale = spec.shorter_side / min(width, height)
        resized_width, resized_height = _scaled(width, scale), _scaled(height, scale)
        pad_x, pad_y = -((resized_width - spec.width) // 2), -((resized_height - spec.height) // 2)
        return _middle(Placement(0, 0, width, height, resized_width, resized_height, pad_x, pad_y), spec)
    scale = min(spec.width / width, spec.height / height)
    resized_width, resized_height = _scaled(width, scale), _scaled(height, scale)
    if spec.fit is Fit.PAD_RIGHT_BOTTOM:
        return Placement(0, 0, width, height, resized_width, resized_height)
    pad_x, pad_y = (spec.width - resized_width) // 2, (spec.height - resized_height) // 2
    return Placement(0, 0, width, height, resized_width, resized_height, pad_x, pad_y)


def _scaled(side: int, scale: float) -> int:
    return max(round(side * scale), 1)


def _middle(whole: Placement, spec: PictureSpec) -> Placement:
    """Of a very long picture the middle, more than a crop can see of it; any other as it is."""
    if whole.resized_width > _MOST_SIDES * spec.width:
        count = _middle_count(whole.width, whole.resized_width, spec.width)
        size, left = round(count * whole.resized_width / whole.width), (whole.width - count) // 2
        return replace(whole, left=left, width=count, resized_width=size, pad_x=-((size - spec.width) // 2))
    if whole.resized_height > _MOST_SIDES * spec.height:
        count = _middle_count(whole.height, whole.resized_height, spec.height)
        size, top = round(count * whole.resized_height / whole.height), (whole.height - count) // 2
        return replace(whole, top=top, height=count, resized_height=size, pad_y=-((size - spec.height) // 2))
    return whole


def _middle_count(length: int, resized: int, network: int) -> int:
    """How many of length pixels become _MOST_SIDES of the network's; odd where length is, so that the middle stays."""
    count = math.ceil(length * _MOST_SIDES * network / resized)
    return count + (length - count) % 2
