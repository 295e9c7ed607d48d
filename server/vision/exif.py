"""Rotates and mirrors images by their EXIF orientation."""

from collections.abc import Callable

import cv2
import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]


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
