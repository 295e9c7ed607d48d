"""Decodes and resizes pictures with OpenCV on the CPU, as penstock.vision does. Imported lazily, because of cv2."""

from collections.abc import Callable

import cv2
import numpy as np
import numpy.typing as npt

from .picture_header import PictureFormat, PictureHeader, PictureRejected
from .picture_kernel import resize_geometry
from .picture_spec import PictureSpec

Pixels = npt.NDArray[np.uint8]

_TURNS: dict[int, Callable[[Pixels], Pixels]] = {
    2: lambda pixels: cv2.flip(pixels, 1),
    3: lambda pixels: cv2.flip(pixels, -1),
    4: lambda pixels: cv2.flip(pixels, 0),
    5: cv2.transpose,
    6: lambda pixels: cv2.rotate(pixels, cv2.ROTATE_90_CLOCKWISE),
    7: lambda pixels: cv2.flip(cv2.transpose(pixels), -1),
    8: lambda pixels: cv2.rotate(pixels, cv2.ROTATE_90_COUNTERCLOCKWISE),
}


def decode_with_opencv(encoded: bytes, header: PictureHeader, *, is_grey: bool) -> Pixels:
    """(height, width, 3) BGR or (height, width), without applying the orientation. Raises PictureRejected."""
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    if is_grey and header.format is PictureFormat.JPEG:
        flags = cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION  # its own luma
    try:
        pixels: Pixels | None = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    except cv2.error as error:
        raise PictureRejected(f"cannot be decoded: OpenCV says {error.err!r}") from None
    if pixels is None:
        raise PictureRejected("cannot be decoded: its pixel data is truncated or corrupt")
    if pixels.shape[:2] != (header.height, header.width):
        raise PictureRejected(
            f"cannot be decoded: its header says {header.width} x {header.height}, its frame says otherwise"
        )
    grey_or_color: Pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY) if is_grey and pixels.ndim == 3 else pixels
    return grey_or_color


def resize_with_opencv(pixels: Pixels, orientation: int, spec: PictureSpec) -> Pixels:
    """(channels, height, width) uint8 for the network, in its colour order, with black padding."""
    turn = _TURNS.get(orientation)
    upright = pixels if turn is None else turn(pixels)
    part = resize_geometry(upright.shape[1], upright.shape[0], spec)
    upright = upright[part.top : part.top + part.height, part.left : part.left + part.width]
    resized = upright
    if upright.shape[:2] != (part.resized_height, part.resized_width):
        resized = cv2.resize(upright, (part.resized_width, part.resized_height), interpolation=cv2.INTER_LINEAR)
    left, top = max(-part.pad_x, 0), max(-part.pad_y, 0)
    resized = resized[top : top + spec.height, left : left + spec.width]
    planes = resized[None] if resized.ndim == 2 else resized.transpose(2, 0, 1)
    canvas = np.zeros((spec.channels, spec.height, spec.width), np.uint8)
    x, y = max(part.pad_x, 0), max(part.pad_y, 0)
    canvas[:, y : y + resized.shape[0], x : x + resized.shape[1]] = planes[::-1] if spec.color == "RGB" else planes
    return canvas
