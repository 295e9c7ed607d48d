"""PNGs are decoded from no more data than their header states, with the same pixels as by libpng."""

import itertools
import struct
import zlib

import cv2
import numpy as np
import pytest

from penstock.protocol.errors import UndecodableImage
from penstock.vision.decode import decode, with_stored_pixels
from penstock.vision.spec import ColorFormat
from tests.vision import images

PICTURE = images.picture(61, 37)
RANDOM = np.random.default_rng(3)
COLOUR_TYPES = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def pixel_bytes(width: int, height: int, bits: int, *, is_interlaced: bool) -> int:
    """The size of the pixel data, counted row by row."""
    passes = ADAM7 if is_interlaced else ((0, 0, 1, 1),)
    sizes = [(len(range(x, width, dx)), len(range(y, height, dy))) for x, y, dx, dy in passes]
    return sum(rows * (1 + (columns * bits + 7) // 8) for columns, rows in sizes if columns)


def png_of(width: int, height: int, color_type: int, depth: int, *, is_interlaced: bool, excess: int = 0) -> bytes:
    """Random pixels under random row filters. excess: additional bytes of pixel data, fewer if negative."""
    size = pixel_bytes(width, height, CHANNELS[color_type] * depth, is_interlaced=is_interlaced)
    raw = bytearray(RANDOM.integers(0, 256, size, np.uint8).tobytes())
    position, passes = 0, ADAM7 if is_interlaced else ((0, 0, 1, 1),)
    for x, y, dx, dy in passes:
        columns = len(range(x, width, dx))
        for _ in range(y, height, dy) if columns else ():
            raw[position] = int(RANDOM.integers(0, 5))
            position += 1 + (columns * CHANNELS[color_type] * depth + 7) // 8
    raw = raw + bytes(excess) if excess >= 0 else raw[:excess]
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, is_interlaced)
    palette = (
        images.png_chunk(b"PLTE", RANDOM.integers(0, 256, 3 << depth, np.uint8).tobytes()) if color_type == 3 else b""
    )
    packed = zlib.compress(bytes(raw))
    cut = int(RANDOM.integers(1, len(packed)))
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            images.png_chunk(b"IHDR", header),
            images.png_chunk(b"gAMA", (20000).to_bytes(4, "big")),
            palette,
            images.png_chunk(b"tEXt", b"a\0b"),
            *(images.png_chunk(b"IDAT", piece) for piece in (packed[:1], packed[1:cut], packed[cut:])),
            images.png_chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(1000))),
            images.png_chunk(b"IEND", b""),
        ]
    )


EVERY_KIND = [(kind, depth) for kind, depths in COLOUR_TYPES.items() for depth in depths]


@pytest.mark.parametrize("is_interlaced", [False, True])
@pytest.mark.parametrize(("color_type", "depth"), EVERY_KIND)
def test_png_of_every_kind_has_the_pixels_that_libpng_gives(color_type: int, depth: int, is_interlaced: bool) -> None:
    """This covers every colour type, depth and interlacing, from one pixel to several stored blocks."""
    for width, height in [(1, 1), (3, 5), (8, 8), (61, 37), (300, 200)]:
        encoded = png_of(width, height, color_type, depth, is_interlaced=is_interlaced)
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        expected = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
        assert np.array_equal(decode(encoded, ColorFormat.RGB).pixels, expected), (width, height)


@pytest.mark.parametrize("is_interlaced", [False, True])
@pytest.mark.parametrize(("color_type", "depth"), EVERY_KIND)
def test_png_with_another_amount_of_pixel_data_is_refused(color_type: int, depth: int, is_interlaced: bool) -> None:
    """One byte more or less than the header states is refused."""
    for (width, height), excess in itertools.product([(1, 1), (61, 37)], [1, 70_000, -1]):
        encoded = png_of(width, height, color_type, depth, is_interlaced=is_interlaced, excess=excess)
        with pytest.raises(UndecodableImage, match="is longer than" if excess > 0 else "truncated or corrupt"):
            decode(encoded, ColorFormat.RGB)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (struct.pack(">IIBBBBB", 4, 4, 8, 5, 0, 0, 0), "colour type 5"),
        (struct.pack(">IIBBBBB", 4, 4, 3, 0, 0, 0, 0), "3 bits"),
        (struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 2), "interlace 2"),
        (struct.pack(">IIBBBB", 4, 4, 8, 2, 0, 0), "12 bytes"),
    ],
)
def test_png_with_an_impossible_header_is_refused(header: bytes, sentence: str) -> None:
    """Each message says what is impossible."""
    chunks = (
        images.png_chunk(b"IHDR", header)
        + images.png_chunk(b"IDAT", zlib.compress(b""))
        + images.png_chunk(b"IEND", b"")
    )
    with pytest.raises(UndecodableImage, match=sentence):
        decode(b"\x89PNG\r\n\x1a\n" + chunks, ColorFormat.RGB)


def test_png_keeps_nothing_that_only_describes_it() -> None:
    """Text, profiles, metadata and further frames never reach libpng."""
    kinds = (b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"gAMA", b"abCd")
    before = b"".join(images.png_chunk(kind, b"secret") for kind in kinds)
    encoded = with_stored_pixels(images.png(PICTURE, color_type=2, before_pixels=before))
    assert b"secret" not in encoded
    assert np.array_equal(decode(bytes(encoded), ColorFormat.RGB).pixels, PICTURE)
