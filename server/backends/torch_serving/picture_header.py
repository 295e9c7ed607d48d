"""What an encoded picture says of itself, as far as choosing its decoder takes: size, orientation, coding. Pure.

The gateway has read the header before (server/vision/header.py, whose refusals are fuller); this one is for those who
ask Triton directly, and costs a few microseconds a JPEG. nvJPEG gets only what its hardware and we are sure of:
baseline JPEGs of 8 bits, grey or YCbCr, in the usual samplings. All else is OpenCV's: progressive, CMYK, RGB, odd
samplings, PNG and WebP.
"""

import re
import struct
from dataclasses import dataclass

_PNG = b"\x89PNG\r\n\x1a\n"
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BASELINE, _PROGRESSIVE = 0xC0, 0xC2
_DECODABLE = frozenset((_BASELINE, 0xC1, _PROGRESSIVE))
_STANDALONE = frozenset((0x01, *range(0xD0, 0xD8)))
_MOST_SCANS = 500
# Sampling factors of the components: grey, 4:4:4, 4:2:2, 4:2:0, 4:4:0.
_USUAL_SAMPLINGS = frozenset((b"\x11", b"\x22", b"\x11\x11\x11", b"\x21\x11\x11", b"\x22\x11\x11", b"\x12\x11\x11"))
_YCBCR_IDS = frozenset((b"\1\2\3", b"\0\1\2"))


class Refused(Exception):
    """The picture cannot be decoded. Its text is the rest of a sentence that begins with the picture."""


@dataclass(frozen=True)
class PictureHeader:
    """width, height: as stored, before the orientation (EXIF's 1 to 8). is_for_gpu: nvJPEG may decode it."""

    width: int
    height: int
    orientation: int = 1
    is_for_gpu: bool = False
    is_jpeg: bool = False


def read_header(data: bytes) -> PictureHeader:
    """Raises Refused where it is no JPEG, PNG or WebP, or is truncated."""
    try:
        if data[:3] == b"\xff\xd8\xff":
            return _jpeg(data)
        if data[:8] == _PNG:
            return _png(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
    except (struct.error, IndexError):
        raise Refused(f"is truncated: it ends after {len(data)} bytes") from None
    raise Refused(f"is no JPEG, PNG or WebP: its first bytes are {data[:8].hex(' ') or 'none'}")


def _jpeg(data: bytes) -> PictureHeader:
    position, orientation, is_jfif, transform = 2, 1, False, -1
    while True:
        while data[position + 1] == 0xFF:
            position += 1
        if data[position] != 0xFF:
            raise Refused(f"is damaged: byte {position} should begin a marker and does not")
        marker = data[position + 1]
        if marker in _STANDALONE:
            position += 2
            continue
        length = data[position + 2] << 8 | data[position + 3]
        begin, position = position + 4, position + 2 + length
        if marker in _SOF:
            break
        if marker in (0xD9, 0xDA) or length < 2 or position > len(data):
            raise Refused("is damaged: no frame header is where it should be")
        if marker == 0xE1 and data[begin : begin + 6] == b"Exif\0\0":
            orientation = _tiff_orientation(data[begin + 6 : position])
        elif marker == 0xE0:
            is_jfif = is_jfif or data[begin : begin + 4] == b"JFIF"
        elif marker == 0xEE and data[begin : begin + 5] == b"Adobe":
            transform = data[begin + 11]
    return _frame(data, marker, begin, (orientation, is_jfif, transform))


def _frame(data: bytes, marker: int, begin: int, said: tuple[int, bool, int]) -> PictureHeader:
    """said: (orientation, whether it is JFIF, Adobe's transform or -1). begin: of the frame header's payload."""
    orientation, is_jfif, transform = said
    precision, height, width, components = struct.unpack_from(">BHHB", data, begin)
    if marker not in _DECODABLE or precision != 8 or components not in (1, 3, 4):
        raise Refused(f"is a JPEG of coding 0x{marker:x}, {precision} bits, {components} components: not decoded here")
    if width == 0 or height == 0:
        raise Refused(f"says that it has {width} x {height} pixels")
    if data.rfind(b"\xff\xd9") < begin:
        raise Refused(f"is truncated: its {len(data)} bytes end without the marker that ends a JPEG")
    if marker == _PROGRESSIVE and (scans := len(re.findall(rb"\xff\xda", data))) > _MOST_SCANS:
        raise Refused(f"has {scans} scans (limit {_MOST_SCANS})")
    table = data[begin + 6 : begin + 6 + 3 * components]
    is_ycbcr = components == 1 or transform == 1 or (transform == -1 and (is_jfif or table[::3] in _YCBCR_IDS))
    is_for_gpu = marker == _BASELINE and is_ycbcr and table[1::3] in _USUAL_SAMPLINGS
    return PictureHeader(width, height, orientation, is_for_gpu, is_jpeg=True)


def _tiff_orientation(tiff: bytes) -> int:
    """EXIF's orientation; 1 where it is absent or broken: a photograph with broken EXIF is still a photograph."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (offset,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, offset)
        for entry in range(count):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, offset + 2 + 12 * entry)
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _png(data: bytes) -> PictureHeader:
    width, height = struct.unpack_from(">II", data, 16)
    orientation, position = 1, len(_PNG)
    while True:
        length, kind = struct.unpack_from(">I4s", data, position)
        if position + 12 + length > len(data):
            raise Refused(f"is truncated: a PNG chunk at byte {position} ends after the last byte")
        if kind == b"eXIf":
            orientation = _tiff_orientation(data[position + 8 : position + 8 + length])
        if kind == b"IEND":
            return PictureHeader(width, height, orientation)
        position += 12 + length


def _webp(data: bytes) -> PictureHeader:
    end = int.from_bytes(data[4:8], "little") + 8
    if end > len(data):
        raise Refused(f"is truncated: a WebP of {len(data)} bytes that says {end}")
    width = height = 0
    orientation, position = 1, 12
    while position + 8 <= end:
        kind, length = struct.unpack_from("<4sI", data, position)
        payload = data[position + 8 : position + 8 + length]
        if kind == b"EXIF":
            orientation = _tiff_orientation(payload.removeprefix(b"Exif\0\0"))
        elif kind in _WEBP_SIZES:
            said_width, said_height = _WEBP_SIZES[kind](payload)
            width, height = max(width, said_width), max(height, said_height)
        position += 8 + length + length % 2
    if width == 0 or height == 0:
        raise Refused("is a WebP without a frame header")
    return PictureHeader(width, height, orientation)


def _canvas_size(payload: bytes) -> tuple[int, int]:
    low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", payload, 4)
    return 1 + (high_width << 16 | low_width), 1 + (high_height << 16 | low_height)


def _lossy_size(payload: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", payload, 6)
    return width & 0x3FFF, height & 0x3FFF


def _lossless_size(payload: bytes) -> tuple[int, int]:
    _, bits = struct.unpack_from("<BI", payload)
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


_WEBP_SIZES = {b"VP8X": _canvas_size, b"VP8 ": _lossy_size, b"VP8L": _lossless_size}
