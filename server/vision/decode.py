"""Encoded images to pixels, defined for every case that the three formats hold.

* Formats: JPEG (baseline and progressive, 8 bits), PNG, WebP; the first bytes decide, not what the sender says. Of an
  animation, the first frame.
* Size: from the header, before anything is decoded; over the limit is TooLarge.
* Damage: truncated or corrupt is refused, not half grey. JPEG warnings of libjpeg-turbo are errors (simplejpeg's strict
    mode), every PNG chunk's checksum is verified, a WebP must be as long as its header states. Stray and fill bytes
    between the segments of a JPEG are not damage.
* Orientation: EXIF's, all eight, applied here and nowhere else.
* CMYK and YCCK JPEGs: inverted, as Adobe writes them and Pillow and OpenCV read them; channel = ink * black / 255.
* 16 bits: the high byte (value >> 8). Palettes are resolved, grey becomes three equal channels.
* Alpha: dropped, the colours stay as stored: as Pillow's convert("RGB") and cv2.imread do, with which models are made.
* GRAY: a JPEG's own luma; for the others cv2's 0.299 R + 0.587 G + 0.114 B.
* Inflation: of a PNG, pixels up to the size in its header; other compressed chunks are not inflated (vision/png.py).
* Colour profiles and PNG gamma are ignored, as cv2.imread ignores them.

Scaled decoding (`scaled-decode`, off by default) lets libjpeg-turbo decode a JPEG at 1/2, 1/4 or 1/8 where that is
still at least twice the network's size. It is a different resize filter, not only a faster one. Measured on FastestDet
(352 x 352, threshold 0.5) with 40 JPEGs: 20 frames of vtest.avi enlarged to 2304 x 1728 and 3072 x 2304, noise of sigma
3, quality 90, 4:2:0; two busy cores of an AMD EPYC, simplejpeg 1.9.0, three runs: decoding 14.6 → 11.4 ms (14.3-14.9 →
10.4-11.6), most of what is left being Huffman decoding. Of 603 boxes 3 % were lost and 3 % are new; the others moved to
an IoU of 0.975 (median; 5 % under 0.923), their scores by 0.006 (median; 0.18 at most). That is too much for a default.
For comparison: decoding at just the network's size saves a third of the time instead of a quarter and loses 13 % of the
boxes; cv2.INTER_AREA in place of INTER_LINEAR loses 16 %. No classifier was at hand: what scaled decoding does to its
top-1 is not measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from server.vision.exif import upright
from server.vision.header import Buffer, PictureFormat, PictureHeader, broken, header_within
from server.vision.png import with_stored_pixels
from server.vision.spec import ColorFormat

Image = npt.NDArray[np.uint8]

DEFAULT_MAX_PIXELS = 40_000_000


@dataclass(frozen=True, slots=True)
class Decoded:
    """pixels: (H, W, 3) uint8 in the asked colour order, (H, W) for GRAY; C-contiguous, upright.

    source_width, source_height: of the whole image, upright; larger than pixels after a scaled decode.
    """

    pixels: Image
    source_width: int
    source_height: int


def decode(
    data: Buffer,
    color: ColorFormat,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    at_least: tuple[int, int] | None = None,
) -> Decoded:
    """The pixels of an encoded image. at_least: (width, height) that a scaled decode must keep, None for full size.

    Raises UnsupportedMedia, TooLarge and UndecodableImage, each saying what is wrong.
    """
    header = header_within(data, max_pixels)
    if header.format is PictureFormat.JPEG:
        stored = _decode_jpeg(data, color, _reduction(header, at_least), header)
    else:
        stored = _decode_with_opencv(data, color, header)
    return Decoded(upright(stored, header.orientation), *header.upright_size)


def _reduction(header: PictureHeader, at_least: tuple[int, int] | None) -> int:
    """8, 4, 2 or 1: powers of two are what libjpeg-turbo has fast code for."""
    if at_least is None:
        return 1
    width, height = (at_least[1], at_least[0]) if header.is_sideways else at_least
    return next((by for by in (8, 4, 2) if header.width >= by * width and header.height >= by * height), 1)


def _decode_jpeg(data: Buffer, color: ColorFormat, reduction: int, header: PictureHeader) -> Image:
    try:
        pixels: Image = simplejpeg.decode_jpeg(
            _without(header.stray, data),
            colorspace=color.name,
            min_width=math.ceil(header.width / reduction),
            min_height=math.ceil(header.height / reduction),
            strict=True,
        )
    except ValueError as error:
        raise broken(PictureFormat.JPEG, str(error)) from None
    if reduction == 1 and pixels.shape[:2] != (header.height, header.width):
        raise broken(PictureFormat.JPEG, f"its header says {header.width} x {header.height}, its frame says otherwise")
    return pixels[..., 0] if color is ColorFormat.GRAY else pixels


def _without(ranges: Sequence[tuple[int, int]], data: Buffer) -> Buffer:
    """The data without those ranges. libjpeg-turbo would skip them with a warning, which counts as damage."""
    if not ranges:
        return data
    begins, ends = [0, *(end for _, end in ranges)], [*(begin for begin, _ in ranges), len(data)]
    return b"".join(data[begin:end] for begin, end in zip(begins, ends, strict=True))


_OPENCV_FLAGS = {
    ColorFormat.RGB: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION,
    ColorFormat.BGR: cv2.IMREAD_COLOR_BGR | cv2.IMREAD_IGNORE_ORIENTATION,
    ColorFormat.GRAY: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION,
}


def _decode_with_opencv(data: Buffer, color: ColorFormat, header: PictureHeader) -> Image:
    encoded = with_stored_pixels(data) if header.format is PictureFormat.PNG else data
    try:
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), _OPENCV_FLAGS[color])
    except cv2.error as error:
        raise broken(header.format, f"OpenCV says {error.err!r}") from None
    if pixels is None:
        raise broken(header.format, "its pixel data is truncated or corrupt")
    if pixels.shape[:2] != (header.height, header.width):
        raise broken(header.format, f"its header says {header.width} x {header.height}, its frame says otherwise")
    grey_or_color: Image = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY) if color is ColorFormat.GRAY else pixels
    return grey_or_color
