"""Masks as COCO run lengths and as outlines; depth as a picture."""

import cv2
import numpy as np
from pycocotools import mask as coco

from penstock.protocol.inference import FloatArray
from penstock.protocol.vision_results import DepthMap, Mask

_MAX_PIXEL = 65535


def rle_of(mask: Mask) -> str:
    """COCO's compressed run-length encoding of the mask in its whole picture."""
    counts = run_lengths(mask)
    encoded = coco.frPyObjects({"size": [mask.height, mask.width], "counts": counts}, mask.height, mask.width)
    text: bytes = encoded["counts"]
    return text.decode("ascii")


def run_lengths(mask: Mask) -> list[int]:
    """Lengths of runs of False and True in turn, False first, from column to column, from top to bottom."""
    columns, rows = mask.bits.shape[1], mask.bits.shape[0]
    padded = np.zeros((columns, rows + 2), np.int8)
    padded[:, 1:-1] = mask.bits.T
    steps = np.diff(padded, axis=1)
    column, row = np.nonzero(steps == 1)
    starts = (mask.left + column) * mask.height + mask.top + row
    column, row = np.nonzero(steps == -1)
    ends = (mask.left + column) * mask.height + mask.top + row
    is_joined = starts[1:] == ends[:-1]  # a run that goes on in the next column
    starts, ends = starts[np.append(True, ~is_joined)[: len(starts)]], ends[np.append(~is_joined, True)[: len(ends)]]
    edges = np.stack([starts, ends], axis=1).ravel()
    lengths = np.diff(edges, prepend=0, append=mask.height * mask.width)
    counts: list[int] = (lengths if lengths[-1] or len(lengths) == 1 else lengths[:-1]).tolist()
    return counts


def mask_of(counts: str, height: int, width: int) -> Mask:
    """The mask of COCO's compressed run lengths, cut to its pixels. Raises ValueError if they do not fit the size."""
    encoded = {"size": [height, width], "counts": counts.encode("ascii")}
    bits = coco.decode(encoded).astype(bool)
    rows, columns = np.flatnonzero(bits.any(axis=1)), np.flatnonzero(bits.any(axis=0))
    if not len(rows):
        return Mask(height, width, 0, 0, np.zeros((0, 0), np.bool_))
    top, left = int(rows[0]), int(columns[0])
    return Mask(height, width, left, top, bits[top : rows[-1] + 1, left : columns[-1] + 1])


def polygons_of(mask: Mask) -> list[FloatArray]:
    """Outlines of the mask's parts, without holes: (n, 2) float32 x, y in pixels of the picture; n is 3 or more."""
    if not mask.bits.size:
        return []
    found, _ = cv2.findContours(mask.bits.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    shift = np.array([mask.left, mask.top], np.float32)
    return [outline[:, 0].astype(np.float32) + shift for outline in found if len(outline) > 2]


def png16_of(depth: DepthMap) -> tuple[bytes, float, float]:
    """(PNG of 16 bits, scale, offset): depth = pixel * scale + offset."""
    low, high = float(depth.values.min()), float(depth.values.max())
    scale = (high - low) / _MAX_PIXEL or 1.0
    pixels = np.round((depth.values.astype(np.float64) - low) / scale).astype(np.uint16)
    return cv2.imencode(".png", pixels)[1].tobytes(), scale, low
