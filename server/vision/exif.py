"""EXIF orientation: reading the one tag that matters, and turning the image as it says."""

import struct
from collections.abc import Callable

import cv2
import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]

_ORIENTATION_TAG = 0x0112
_SHORT = 3


def orientation_of_tiff(tiff: bytes) -> int:
    """EXIF's orientation, 1 to 8, of a TIFF block; 1 where it is absent, broken or out of range.

    A photograph with broken EXIF is still a photograph, so nothing here is an error.
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        return _orientation_of_directory(tiff, order)
    except struct.error:
        return 1


def _orientation_of_directory(tiff: bytes, order: str) -> int:
    (offset,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, offset)
    for entry in range(count):
        tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, offset + 2 + 12 * entry)
        if tag == _ORIENTATION_TAG:
            return value if kind == _SHORT and 1 <= value <= 8 else 1
    return 1


def upright(image: Image, orientation: int) -> Image:
    """The image as a person sees it: (H, W[, C]) turned and mirrored as EXIF's orientation asks, C-contiguous."""
    turn = _TURNS.get(orientation)
    return image if turn is None else turn(image)


def _transverse(image: Image) -> Image:
    turned: Image = cv2.flip(cv2.transpose(image), -1)
    return turned


# EXIF 2.32, tag 274: where row 0 and column 0 of what is stored belong.
_TURNS: dict[int, Callable[[Image], Image]] = {
    2: lambda image: cv2.flip(image, 1),
    3: lambda image: cv2.flip(image, -1),
    4: lambda image: cv2.flip(image, 0),
    5: cv2.transpose,
    6: lambda image: cv2.rotate(image, cv2.ROTATE_90_CLOCKWISE),
    7: _transverse,
    8: lambda image: cv2.rotate(image, cv2.ROTATE_90_COUNTERCLOCKWISE),
}
