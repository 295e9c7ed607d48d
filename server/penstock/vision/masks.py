"""Masks as COCO run lengths and as outlines; depth as a picture."""

from collections.abc import Sequence

import cv2
import numpy as np
from pycocotools import mask as coco

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import DepthMap, Mask

MAX_PIXEL = 65535


def rle_of(mask: Mask) -> str:
    """COCO's compressed run-length encoding of the mask in its whole picture."""
    counts = run_lengths(mask)
    encoded = coco.frPyObjects({"size": [mask.height, mask.width], "counts": counts}, mask.height, mask.width)
    text: bytes = encoded["counts"]
    return text.decode("ascii")


def run_lengths(mask: Mask) -> list[int]:
    """Lengths of runs of False and True in turn, False first, from column to column, from top to bottom."""
    rows, columns = mask.bits.shape
    stride = rows + 2
    padded = np.zeros((columns, stride), np.bool_)  # each column begins and ends with False
    padded[:, 1:-1] = mask.bits.T
    flat = padded.ravel()
    steps = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    edges = (mask.left + steps // stride) * mask.height + mask.top + steps % stride - 1
    starts, ends = edges[::2], edges[1::2]
    is_joined = starts[1:] == ends[:-1]  # a run that goes on in the next column
    starts, ends = starts[np.append(True, ~is_joined)[: len(starts)]], ends[np.append(~is_joined, True)[: len(ends)]]
    edges = np.stack([starts, ends], axis=1).ravel()
    lengths = np.diff(edges, prepend=0, append=mask.height * mask.width)
    counts: list[int] = (lengths if lengths[-1] or len(lengths) == 1 else lengths[:-1]).tolist()
    return counts


def mask_of(counts: str, height: int, width: int) -> Mask:
    """The mask of COCO's compressed run lengths, cut to its pixels. Raises ValueError if they do not fit the size."""
    lengths = _decoded(counts)
    if (lengths < 0).any() or lengths.sum() != height * width:
        raise ValueError(f"the run lengths are not those of a mask of {width}x{height} pixels")
    is_set = np.arange(len(lengths)) % 2 == 1
    bits = np.repeat(is_set, lengths).reshape(width, height).T
    rows, columns = np.flatnonzero(bits.any(axis=1)), np.flatnonzero(bits.any(axis=0))
    if not len(rows):
        return Mask(height, width, 0, 0, np.zeros((0, 0), np.bool_))
    top, left = int(rows[0]), int(columns[0])
    return Mask(height, width, left, top, bits[top : rows[-1] + 1, left : columns[-1] + 1])


_ROWS = 64
_MAX_DIGITS = 7  # of a run length: 5 bits each


def _decoded(counts: str) -> IntArray:
    """The numbers of COCO's compressed form: digits of 5 bits, the lowest first, as differences to the number before
    the last."""
    digits = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - ord("0")
    ends = np.flatnonzero(digits & 0x20 == 0)
    if not len(ends) or ends[-1] != len(digits) - 1 or digits.min() < 0 or digits.max() > 0x3F:
        raise ValueError("the run lengths are not in COCO's compressed form")
    starts = np.append(0, ends[:-1] + 1)
    sizes = ends - starts + 1
    if sizes.max() > _MAX_DIGITS:
        raise ValueError(f"a run length has more than {_MAX_DIGITS} digits")
    places = np.arange(len(digits)) - np.repeat(starts, sizes)
    numbers = np.add.reduceat((digits & 0x1F) << 5 * places, starts)
    numbers -= np.where(digits[ends] & 0x10, 1 << 5 * sizes, 0)
    numbers[1::2], numbers[2::2] = np.cumsum(numbers[1::2]), np.cumsum(numbers[2::2])
    return numbers


def polygons_of(mask: Mask) -> list[FloatArray]:
    """Outlines of the mask's parts, without holes: (n, 2) float32 x, y in pixels of the picture; n is 3 or more."""
    if not mask.bits.size:
        return []
    found, _ = cv2.findContours(mask.bits.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    shift = np.array([mask.left, mask.top], np.float32)
    return [outline[:, 0].astype(np.float32) + shift for outline in found if len(outline) > 2]


def mask_of_outlines(outlines: Sequence[FloatArray], height: int, width: int) -> Mask:
    """The filled outlines, (n, 2) x, y each, as a mask of the whole picture."""
    pixels = np.zeros((height, width), np.uint8)
    cv2.fillPoly(pixels, [outline.round().astype(np.int32) for outline in outlines], (1,))
    return Mask(height, width, 0, 0, pixels.astype(np.bool_))


def png16_of(depth: DepthMap) -> tuple[bytes, float, float]:
    """(PNG of 16 bits, scale, offset): depth = pixel * scale + offset."""
    low, high = float(depth.values.min()), float(depth.values.max())
    scale = (high - low) / MAX_PIXEL or 1.0
    pixels = np.empty(depth.values.shape, np.uint16)
    for top in range(0, len(pixels), _ROWS):  # float64 of a whole large picture needs much memory
        rows = depth.values[top : top + _ROWS].astype(np.float64)
        pixels[top : top + _ROWS] = np.round((rows - low) / scale)
    return cv2.imencode(".png", pixels)[1].tobytes(), scale, low


def depth_of(png: bytes, scale: float, offset: float) -> FloatArray:
    """(height, width) float32: the depth of a PNG of 16 bits. Raises ValueError for a PNG of several channels."""
    pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED) if png else None
    if pixels is None or pixels.ndim != 2:
        raise ValueError("the depth map is not a PNG of one channel")
    values: FloatArray = (pixels.astype(np.float64) * scale + offset).astype(np.float32)
    return values
