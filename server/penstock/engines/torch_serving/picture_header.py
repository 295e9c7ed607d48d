"""Reads picture headers: format, size, orientation, and the suitable decoder. Decodes no pixels.

Also used by the gateway; it is here, because Triton's model process has no other package of penstock.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

Buffer = bytes | memoryview

MAX_PIXELS = 40_000_000  # default of the setting max_pixels
MAX_PIXELS_VARIABLE = "PENSTOCK_MAX_PIXELS"  # by which the model process gets it
MAX_PARTS = 1 << 14  # segments or chunks, and bytes between JPEG segments: a megabyte of empty chunks took 80 ms
MAX_JPEG_SCANS = 100  # encoders write 10 to 20; each costs a millisecond per megapixel
MIN_JPEG_SCANS, MAX_SCANNED_PIXELS = 20, 1 << 30  # scans allowed at any size; limit for the pixels of all scans
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class PictureFormat(StrEnum):
    """The supported formats."""

    JPEG = "jpeg"
    PNG = "png"
    WEBP = "webp"


class PictureRejected(Exception):
    """The picture cannot be decoded. The text completes a sentence about the picture."""

    def __init__(self, what: str, picture_format: PictureFormat | None = None) -> None:
        """picture_format: by the first bytes; None for an unsupported format."""
        super().__init__(what)
        self.picture_format = picture_format


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """Header of a picture. width, height: as stored, before the orientation is applied."""

    format: PictureFormat
    width: int
    height: int
    orientation: int = 1  # EXIF's, 1 to 8
    is_for_gpu: bool = False  # 8-bit baseline JPEG that nvJPEG's hardware decodes
    pixels_at: int = 0  # offset of a JPEG's first scan
    stray: tuple[tuple[int, int], ...] = ()  # (begin, end) of bytes outside of JPEG segments

    @property
    def is_sideways(self) -> bool:
        """Whether the orientation swaps width and height."""
        return self.orientation >= 5

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) after the orientation is applied."""
        return (self.height, self.width) if self.is_sideways else (self.width, self.height)


def sniff(data: Buffer) -> PictureFormat | None:
    """The format by the first bytes; None for an unsupported one."""
    head = bytes(data[:12])
    if head.startswith(b"\xff\xd8\xff"):
        return PictureFormat.JPEG
    if head.startswith(PNG_SIGNATURE):
        return PictureFormat.PNG
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return PictureFormat.WEBP
    return None


def read_header(data: Buffer) -> PictureHeader:
    """Raises PictureRejected for other formats, corrupt or truncated headers, and too many parts."""
    picture_format = sniff(data)
    if picture_format is None:
        raise PictureRejected(f"is not a JPEG, PNG or WebP: its first bytes are {bytes(data[:8]).hex(' ') or 'none'}")
    try:
        return _READERS[picture_format](data)
    except (struct.error, IndexError):
        raise PictureRejected(f"ends inside its header, after {len(data)} bytes", picture_format) from None


def orientation_of_tiff(tiff: bytes) -> int:
    """EXIF's orientation, 1 to 8, in a TIFF block; 1 if it is absent or invalid."""
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


def _with_part_limit(parts: int, picture_format: PictureFormat) -> int:
    if parts > MAX_PARTS:
        raise PictureRejected(f"has more than {MAX_PARTS} segments or chunks", picture_format)
    return parts


# JPEG ---------------------------------------------------------------------------------------------------------------

_BASELINE, _PROGRESSIVE, _SCAN = 0xC0, 0xC2, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_DECODABLE = frozenset((_BASELINE, 0xC1, _PROGRESSIVE))
_STANDALONE = frozenset((0x01, *range(0xD0, 0xD8)))
# What libjpeg-turbo accepts before a scan: tables, restart interval, DNL, APPn, comments. Its decoder fails for others.
_TABLES = frozenset((0xC4, 0xCC, 0xDB, 0xDC, 0xDD, *range(0xE0, 0xF0), 0xFE))
_CONTENT_MARKERS = frozenset((0xE0, 0xE1, 0xEE, _SCAN)) | _FRAMES  # segments with size, orientation, colours or decoder
_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
_SCAN_MARKER = re.compile(rb"\xff\xda")
# Sampling factors of the components: grey, 4:4:4, 4:2:2, 4:2:0, 4:4:0.
_USUAL_SAMPLINGS = frozenset((b"\x11", b"\x22", b"\x11\x11\x11", b"\x21\x11\x11", b"\x22\x11\x11", b"\x12\x11\x11"))
_YCBCR_IDS = frozenset((b"\1\2\3", b"\0\1\2"))


@dataclass(slots=True)
class _JpegSegments:
    frame: bytes = b""
    frame_marker: int = 0
    size: tuple[int, int] = 0, 0
    tiff: bytes = b""
    is_jfif: bool = False
    transform: int = -1

    def add(self, marker: int, payload: Buffer) -> None:
        if marker in _FRAMES:
            if self.frame_marker:
                raise _rejected_jpeg("has two frame headers")
            self.frame_marker, self.frame = marker, bytes(payload[:18])
            self.size = _jpeg_size(marker, self.frame)
        elif marker == 0xE1 and not self.frame_marker and payload[:6] == b"Exif\0\0":
            self.tiff = bytes(payload[6:])
        elif marker == 0xE0:
            self.is_jfif = self.is_jfif or payload[:4] == b"JFIF"
        elif marker == 0xEE and payload[:5] == b"Adobe" and len(payload) >= 12:
            self.transform = payload[11]

    @property
    def is_for_gpu(self) -> bool:
        table = self.frame[6:]
        is_ycbcr = len(table) == 3 or self.transform == 1
        is_ycbcr = is_ycbcr or (self.transform == -1 and (self.is_jfif or table[::3] in _YCBCR_IDS))
        return self.frame_marker == _BASELINE and is_ycbcr and table[1::3] in _USUAL_SAMPLINGS


def _rejected_jpeg(what: str) -> PictureRejected:
    return PictureRejected(what, PictureFormat.JPEG)


def _read_jpeg(data: Buffer) -> PictureHeader:
    found, stray = _JpegSegments(), list[tuple[int, int]]()
    for marker, begin, end in _jpeg_segments(data, stray):
        if marker != _SCAN:
            found.add(marker, data[begin:end])
        elif not found.frame_marker:
            break
        else:
            _limit_scans(data, found, data[begin], begin)
            is_for_gpu = found.is_for_gpu and not stray
            orientation = orientation_of_tiff(found.tiff)
            return PictureHeader(PictureFormat.JPEG, *found.size, orientation, is_for_gpu, end, tuple(stray))
    raise _rejected_jpeg("has no frame header")


def _jpeg_segments(data: Buffer, stray: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(marker, begin, end of its payload) of segments in _CONTENT_MARKERS up to the first scan. Appends to stray."""
    position, parts = 2, 0
    while True:
        begin = position
        if data[position] != 0xFF or data[position + 1] in (0x00, 0xFF):
            position = _next_marker(data, position)
            if bytes(data[begin:position]).strip(b"\xff"):  # other bytes are fill bytes, which the standard allows
                stray.append((begin, position))
        parts = _with_part_limit(parts + position - begin + 1, PictureFormat.JPEG)
        marker = data[position + 1]
        position += 2
        if marker in _STANDALONE:
            continue
        if marker == 0xD9:
            return
        if marker not in _TABLES and marker not in _FRAMES and marker != _SCAN:
            raise _rejected_jpeg(f"has the marker 0x{marker:x} at byte {position - 2}, where it is not allowed")
        length = max(data[position] << 8 | data[position + 1], 2)  # libjpeg-turbo, too, reads 0 and 1 as 2
        if position + length > len(data):
            raise _rejected_jpeg(f"is truncated: the segment at byte {position} has fewer than its {length} bytes")
        if marker in _CONTENT_MARKERS:
            yield marker, position + 2, position + length
        position += length


def _next_marker(data: Buffer, position: int) -> int:
    found = _MARKER.search(data, position, position + MAX_PARTS + 2)
    if found is None:
        _with_part_limit(len(data) - position, PictureFormat.JPEG)
        raise IndexError
    return found.start()


def _jpeg_size(marker: int, frame: bytes) -> tuple[int, int]:
    """(width, height). Raises PictureRejected for an unsupported coding."""
    precision, height, width, components = struct.unpack_from(">BHHB", frame)
    if marker not in _DECODABLE:
        raise _rejected_jpeg(f"has a coding (marker 0x{marker:x}) that is neither baseline nor progressive")
    if precision != 8:
        raise _rejected_jpeg(f"has {precision} bits a sample; 8 are supported")
    if components not in (1, 3, 4):
        raise _rejected_jpeg(f"has {components} components; 1, 3 and 4 are supported")
    if width == 0 or height == 0:
        raise _rejected_jpeg(f"declares {width} x {height} pixels")
    return width, height


def _limit_scans(data: Buffer, found: _JpegSegments, components: int, begin: int) -> None:
    """components: of the first scan. With all components of a baseline JPEG, it is the only scan."""
    if found.frame_marker != _PROGRESSIVE and components == found.frame[5]:
        return
    width, height = found.size
    most = min(MAX_JPEG_SCANS, max(MIN_JPEG_SCANS, MAX_SCANNED_PIXELS // (width * height)))
    if next(islice(_SCAN_MARKER.finditer(data, begin), most - 1, None), None):
        raise _rejected_jpeg(f"has more than {most} scans")


# PNG ----------------------------------------------------------------------------------------------------------------


def _read_png(data: Buffer) -> PictureHeader:
    size: tuple[int, int] | None = None
    tiff: Buffer = b""
    has_pixels = False
    for kind, payload in png_chunks(data):
        if size is None:
            if kind != b"IHDR":
                raise PictureRejected(f"has {kind!r} as its first chunk, not IHDR", PictureFormat.PNG)
            size = struct.unpack_from(">II", payload)
        elif kind == b"eXIf":
            tiff = payload
        has_pixels = has_pixels or kind == b"IDAT"
    if size is None or not has_pixels:
        raise PictureRejected("has no pixels (no IDAT chunk)", PictureFormat.PNG)
    if 0 in size:
        raise PictureRejected(f"declares {size[0]} x {size[1]} pixels", PictureFormat.PNG)
    return PictureHeader(PictureFormat.PNG, *size, orientation_of_tiff(bytes(tiff)))


def png_chunks(data: Buffer, *, is_verified: bool = False) -> Iterator[tuple[bytes, Buffer]]:
    """(kind, payload) of each chunk before IEND. is_verified: skip the checksums. Raises PictureRejected."""
    position, parts = len(PNG_SIGNATURE), 0
    while True:
        parts = _with_part_limit(parts + 1, PictureFormat.PNG)
        if position + 12 > len(data):
            raise PictureRejected(
                f"is truncated: it ends at byte {len(data)}, without its IEND chunk", PictureFormat.PNG
            )
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if end + 4 > len(data):
            where = f"its chunk {kind!r} at byte {position} ends after the last byte"
            raise PictureRejected(f"is truncated: {where}", PictureFormat.PNG)
        if not is_verified and data[end : end + 4] != zlib.crc32(data[position + 4 : end]).to_bytes(4, "big"):
            where = f"of its chunk {kind!r} at byte {position}"
            raise PictureRejected(f"has a wrong checksum {where}", PictureFormat.PNG)
        if kind == b"IEND":
            return
        yield kind, data[position + 8 : end]
        position = end + 4


# WebP ---------------------------------------------------------------------------------------------------------------


def _read_webp(data: Buffer) -> PictureHeader:
    """The size is the larger of canvas and bitstream, because a decoder may allocate either."""
    (riff_size,) = struct.unpack_from("<I", data, 4)
    if riff_size + 8 > len(data):
        raise PictureRejected(f"is truncated: it has {len(data)} of {riff_size + 8} bytes", PictureFormat.WEBP)
    width = height = 0
    tiff: Buffer = b""
    for kind, payload in _webp_chunks(data[: riff_size + 8]):
        if kind in _WEBP_SIZES:
            own_width, own_height = _WEBP_SIZES[kind](payload)
            width, height = max(width, own_width), max(height, own_height)
        elif kind == b"EXIF":
            tiff = payload
    if width == 0 or height == 0:
        raise PictureRejected("has no frame header", PictureFormat.WEBP)
    orientation = orientation_of_tiff(bytes(tiff).removeprefix(b"Exif\0\0"))
    return PictureHeader(PictureFormat.WEBP, width, height, orientation)


def _webp_chunks(data: Buffer) -> Iterator[tuple[bytes, Buffer]]:
    position, parts = 12, 0
    while position + 8 <= len(data):
        parts = _with_part_limit(parts + 1, PictureFormat.WEBP)
        kind, length = struct.unpack_from("<4sI", data, position)
        if position + 8 + length > len(data):
            where = f"its chunk {kind!r} at byte {position} ends after the last byte"
            raise PictureRejected(f"is truncated: {where}", PictureFormat.WEBP)
        yield kind, data[position + 8 : position + 8 + length]
        position += 8 + length + length % 2


def _canvas_size(payload: Buffer) -> tuple[int, int]:
    low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", payload, 4)
    return 1 + (high_width << 16 | low_width), 1 + (high_height << 16 | low_height)


def _lossy_size(payload: Buffer) -> tuple[int, int]:
    if bytes(payload[3:6]) != b"\x9d\x01\x2a":
        raise PictureRejected("has a lossy frame without its start code", PictureFormat.WEBP)
    width, height = struct.unpack_from("<HH", payload, 6)
    return width & 0x3FFF, height & 0x3FFF


def _lossless_size(payload: Buffer) -> tuple[int, int]:
    signature, bits = struct.unpack_from("<BI", payload)
    if signature != 0x2F:
        raise PictureRejected("has a lossless frame without its signature", PictureFormat.WEBP)
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


_WEBP_SIZES = {b"VP8X": _canvas_size, b"VP8 ": _lossy_size, b"VP8L": _lossless_size}
_READERS = {PictureFormat.JPEG: _read_jpeg, PictureFormat.PNG: _read_png, PictureFormat.WEBP: _read_webp}
