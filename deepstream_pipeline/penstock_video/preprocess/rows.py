"""A picture as a model input row, bit-equal to what the gateway's image endpoint makes of it."""

from functools import lru_cache

import cv2
import numpy as np
import numpy.typing as npt

from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import NUMPY_OF, Allocate, geometry_of, prepare
from penstock.vision.spec import ColorFormat, PrepareSpec

__all__ = ["PrepareSpec", "geometry_of", "prepare_row", "row_bytes_of", "row_dtype", "wants_bgr"]

Pixels = npt.NDArray[np.uint8]
Row = npt.NDArray[np.uint8] | npt.NDArray[np.float32] | npt.NDArray[np.float16]


def prepare_row(pixels: Pixels, spec: PrepareSpec, allocate: Allocate = np.empty, *, is_bgr: bool = False) -> Row:
    """The network's input for a picture (H, W, 3) of RGB, or BGR: no batch axis, of spec's layout and datatype.

    allocate(shape, dtype) gives the array that is written and returned, such as a view of shared memory. The picture's
    lines may lie apart. One whose order is the network's own is not copied.
    """
    height, width = pixels.shape[:2]
    array, _ = prepare(DecodedImage(_in_order(pixels, spec.color, is_bgr), width, height), spec, allocate)
    row: Row = array
    return row


def wants_bgr(spec: PrepareSpec) -> bool:
    """Whether a picture that is converted for this network alone is best given as BGR."""
    return spec.color is ColorFormat.BGR


def row_dtype(spec: PrepareSpec) -> npt.DTypeLike:
    """The element type of its rows."""
    return NUMPY_OF[spec.datatype]


@lru_cache(maxsize=1024)
def row_bytes_of(width: int, height: int, spec: PrepareSpec) -> int:
    """Of the row that a picture of that size becomes."""
    geometry = geometry_of(width, height, spec)
    values = geometry.network_width * geometry.network_height * spec.color.channels
    return values * np.dtype(row_dtype(spec)).itemsize


def _in_order(pixels: Pixels, color: ColorFormat, is_bgr: bool) -> Pixels:
    if color is ColorFormat.GRAY:
        grey: Pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY if is_bgr else cv2.COLOR_RGB2GRAY)
        return grey
    if (color is ColorFormat.BGR) is is_bgr:
        return pixels
    swapped: Pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)  # its own inverse
    return swapped
