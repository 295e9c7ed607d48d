"""What an encoded image says of itself, read before anything is decoded: format, size, orientation.

Own readers of a few bytes each, because the question "how many pixels would this be?" must be answered by code that
allocates nothing. They follow the decoders: where a decoder takes the first frame header that it meets, so do they.
"""

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from server.core.errors import TooLarge, UndecodableImage, UnsupportedMedia
from server.vision.exif import orientation_of_tiff

Buffer = bytes | memoryview
MAX_PARTS = 1 << 14  # an event loop reads headers, too: a megabyte of empty chunks took it 80 ms

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class ImageFormat(StrEnum):
    """The formats that we take."""

    JPEG = "jpeg"
    PNG = "png"
    WEBP = "webp"


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Size as stored, before the orientation is applied. orientation: EXIF's 1 to 8, 1 where nothing is said."""

    format: ImageFormat
    width: int
    height: int
    orientation: int = 1

    @property
    def is_sideways(self) -> bool:
        """Whether width and height change places for a person who looks at it."""
        return self.orientation >= 5

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) as a person sees it."""
        return (self.height, self.width) if self.is_sideways else (self.width, self.height)


# What else turns up where an image is expected, by its first bytes, to be named in the refusal.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (rb"GIF8[79]a", "a GIF"),
    (rb"BM.{4}\0\0\0\0", "a BMP"),
    (rb"II\*\0|MM\0\*|II\+\0|MM\0\+", "a TIFF"),
    (rb"....ftyp(avif|avis)", "an AVIF"),
    (rb"....ftyp(heic|heix|hevc|mif1|msf1)", "a HEIC"),
    (rb"....ftyp", "a video or another ISO media file"),
    (rb"8BPS", "a Photoshop document"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "a PostScript file"),
    (rb"%PDF", "a PDF"),
    (rb"SIMPLE  =", "a FITS file"),
    (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "a JPEG 2000"),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "a JPEG XL"),
    (rb"P[1-7]\s", "a PNM"),
    (rb"\x76\x2f\x31\x01", "an OpenEXR"),
    (rb"\0\0\x01\0", "an icon"),
    (rb"RIFF....AVI ", "an AVI video"),
    (rb"\s*<(\?xml|svg|!DOCTYPE|html)", "XML, SVG or HTML"),
    (rb"\x1f\x8b", "gzip data"),
    (rb"PK\x03\x04", "a zip archive"),
    (rb"\s*[\[{]", "JSON"),
    (rb"data:image/", "a data URL; send the bytes that its base64 stands for"),
    (rb"/9j/|iVBORw0KGgo|UklGR", "base64 text; send the bytes that it stands for"),
)


def sniff(data: Buffer) -> ImageFormat | None:
    """The format by the first bytes, whatever the sender calls it; None for none of ours."""
    head = bytes(data[:12])
    if head.startswith(b"\xff\xd8\xff"):
        return ImageFormat.JPEG
    if head.startswith(PNG_SIGNATURE):
        return ImageFormat.PNG
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return ImageFormat.WEBP
    return None


def codec_label(data: Buffer) -> str:
    """jpeg, png, webp or unknown, by the first bytes: a bounded label."""
    image_format = sniff(data)
    return image_format.value if image_format is not None else "unknown"


def read_header(data: Buffer) -> ImageHeader:
    """Format, size and orientation, without decoding a pixel.

    Raises UnsupportedMedia for another format, naming what it looks like, and UndecodableImage where the header is
    truncated or broken.
    """
    if len(data) == 0:
        raise UndecodableImage("the image has no bytes; send a JPEG, PNG or WebP")
    image_format = sniff(data)
    if image_format is None:
        raise _refusal(bytes(data[:64]))
    try:
        return _READERS[image_format](data)
    except (struct.error, IndexError):
        raise broken(image_format, f"it ends inside its header, after {len(data)} bytes") from None


def header_within(data: Buffer, max_pixels: int) -> ImageHeader:
    """As read_header. Raises TooLarge, too, for more pixels than that."""
    header = read_header(data)
    if (pixels := header.width * header.height) > max_pixels:
        raise TooLarge(f"the image has {header.width} x {header.height} = {pixels} pixels (limit {max_pixels})")
    return header


def _count(parts: int, image_format: ImageFormat) -> int:
    """One part more. Raises UndecodableImage beyond MAX_PARTS."""
    if parts >= MAX_PARTS:
        raise broken(image_format, f"it has more than {MAX_PARTS} segments or chunks")
    return parts + 1


def broken(image_format: ImageFormat, what: str) -> UndecodableImage:
    """The one sentence for an image that cannot be decoded."""
    return UndecodableImage(f"the {image_format.upper()} image cannot be decoded: {what}")


def _refusal(head: bytes) -> UndecodableImage | UnsupportedMedia:
    if _begins_like_ours(head):
        return UndecodableImage(f"the image ends after {len(head)} bytes, inside its first marker")
    seen = next((name for pattern, name in _OTHERS if re.match(pattern, head, re.DOTALL)), None)
    what = f"this is {seen}" if seen else f"the first bytes are {head[:8].hex(' ')}"
    return UnsupportedMedia(f"not an image format that we take (JPEG, PNG, WebP): {what}")


def _begins_like_ours(head: bytes) -> bool:
    """Of a head that sniff() does not know: whether it is the stump of one that it would."""
    if b"\xff\xd8\xff".startswith(head) or PNG_SIGNATURE.startswith(head):
        return True
    return len(head) < 12 and b"RIFF".startswith(head[:4]) and b"WEBP".startswith(head[8:])


# JPEG ---------------------------------------------------------------------------------------------------------------

_SOF_DECODABLE = {0xC0, 0xC1, 0xC2}
_SOF = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_EXIF = 0xE1
_TELLING = _SOF | {_EXIF}
_STANDALONE = {0x01, *range(0xD0, 0xD8)}
_SEGMENT_LENGTH = struct.Struct(">H")
_SCAN = re.compile(rb"\xff\xda")
_FILL = re.compile(rb"\xff+")  # before a marker any number of them; each counts, since an engine may walk them singly
MAX_JPEG_SCANS = 500  # libjpeg-turbo's own tools stop there: a small file of many scans costs minutes


def _read_jpeg(data: Buffer) -> ImageHeader:
    tiff: Buffer = b""
    for marker, payload in _jpeg_segments(data):
        if marker == _EXIF and payload[:6] == b"Exif\0\0":
            tiff = payload[6:]
        if marker in _SOF:
            return _jpeg_header(data, marker, payload, orientation_of_tiff(bytes(tiff)))
    raise broken(ImageFormat.JPEG, "it has no frame header")


def _jpeg_header(data: Buffer, marker: int, payload: Buffer, orientation: int) -> ImageHeader:
    precision, height, width, components = struct.unpack_from(">BHHB", payload)
    if marker not in _SOF_DECODABLE:
        raise broken(ImageFormat.JPEG, f"its coding (marker 0x{marker:x}) is neither baseline nor progressive")
    if precision != 8:
        raise broken(ImageFormat.JPEG, f"it has {precision} bits a sample; 8 are supported")
    if components not in (1, 3, 4):
        raise broken(ImageFormat.JPEG, f"it has {components} components; 1, 3 and 4 are supported")
    if width == 0 or height == 0:
        raise broken(ImageFormat.JPEG, f"its header says {width} x {height} pixels")
    if marker == 0xC2 and next(islice(_SCAN.finditer(data), MAX_JPEG_SCANS, None), None):
        raise broken(ImageFormat.JPEG, f"it has more than {MAX_JPEG_SCANS} scans")
    return ImageHeader(ImageFormat.JPEG, width, height, orientation)


def _jpeg_segments(data: Buffer) -> Iterator[tuple[int, Buffer]]:
    """(marker, payload) of those that tell of size or orientation, up to the first scan."""
    position, parts = 2, 0
    while True:
        fill = _FILL.match(data, position)
        if fill is None:
            if position >= len(data):
                raise IndexError
            raise broken(ImageFormat.JPEG, f"byte {position} should begin a marker and does not")
        parts, position = _count(parts + fill.end() - position - 1, ImageFormat.JPEG), fill.end()
        marker = data[position]
        position += 1
        if marker in (0xD9, 0xDA):
            return
        if marker in _STANDALONE:
            continue
        (length,) = _SEGMENT_LENGTH.unpack_from(data, position)
        if length < 2 or position + length > len(data):
            raise broken(ImageFormat.JPEG, f"the segment at byte {position} says {length} bytes, which it has not")
        if marker in _TELLING:
            yield marker, data[position + 2 : position + length]
        position += length


# PNG ----------------------------------------------------------------------------------------------------------------


def _read_png(data: Buffer) -> ImageHeader:
    """Walks every chunk and checks its CRC: a PNG that ends early must not come out half grey."""
    size: tuple[int, int] | None = None
    tiff: Buffer = b""
    has_pixels = False
    for kind, payload in _png_chunks(data):
        if size is None:
            if kind != b"IHDR":
                raise broken(ImageFormat.PNG, f"its first chunk is {kind!r}, not IHDR")
            size = struct.unpack_from(">II", payload)
        elif kind == b"eXIf":
            tiff = payload
        has_pixels = has_pixels or kind == b"IDAT"
    if size is None or not has_pixels:
        raise broken(ImageFormat.PNG, "it has no pixels (no IDAT chunk)")
    if 0 in size:
        raise broken(ImageFormat.PNG, f"its header says {size[0]} x {size[1]} pixels")
    return ImageHeader(ImageFormat.PNG, size[0], size[1], orientation_of_tiff(bytes(tiff)))


def _png_chunks(data: Buffer) -> Iterator[tuple[bytes, Buffer]]:
    position, parts = len(PNG_SIGNATURE), 0
    while True:
        parts = _count(parts, ImageFormat.PNG)
        if position + 12 > len(data):
            raise broken(ImageFormat.PNG, f"it ends at byte {len(data)}, without its IEND chunk")
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if end + 4 > len(data):
            raise broken(ImageFormat.PNG, f"its chunk {kind!r} at byte {position} ends after the last byte")
        (checksum,) = struct.unpack_from(">I", data, end)
        if zlib.crc32(data[position + 4 : end]) != checksum:
            raise broken(ImageFormat.PNG, f"the checksum of its chunk {kind!r} at byte {position} is wrong")
        if kind == b"IEND":
            return
        yield kind, data[position + 8 : end]
        position = end + 4


# WebP ---------------------------------------------------------------------------------------------------------------


def _read_webp(data: Buffer) -> ImageHeader:
    """The larger of the canvas and the bitstream, so that neither can hide behind the other."""
    (riff_size,) = struct.unpack_from("<I", data, 4)
    if riff_size + 8 > len(data):
        raise broken(ImageFormat.WEBP, f"it has {len(data)} bytes and says {riff_size + 8}")
    width = height = 0
    tiff: Buffer = b""
    for kind, payload in _webp_chunks(data[: riff_size + 8]):
        if kind in _WEBP_SIZES:
            said_width, said_height = _WEBP_SIZES[kind](payload)
            width, height = max(width, said_width), max(height, said_height)
        elif kind == b"EXIF":
            tiff = payload
    if width == 0 or height == 0:
        raise broken(ImageFormat.WEBP, "it has no frame header")
    return ImageHeader(ImageFormat.WEBP, width, height, orientation_of_tiff(bytes(tiff).removeprefix(b"Exif\0\0")))


def _webp_chunks(data: Buffer) -> Iterator[tuple[bytes, Buffer]]:
    position, parts = 12, 0
    while position + 8 <= len(data):
        parts = _count(parts, ImageFormat.WEBP)
        kind, length = struct.unpack_from("<4sI", data, position)
        if position + 8 + length > len(data):
            raise broken(ImageFormat.WEBP, f"its chunk {kind!r} at byte {position} ends after the last byte")
        yield kind, data[position + 8 : position + 8 + length]
        position += 8 + length + length % 2


def _canvas_size(payload: Buffer) -> tuple[int, int]:
    low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", payload, 4)
    return 1 + (high_width << 16 | low_width), 1 + (high_height << 16 | low_height)


def _lossy_size(payload: Buffer) -> tuple[int, int]:
    if bytes(payload[3:6]) != b"\x9d\x01\x2a":
        raise broken(ImageFormat.WEBP, "its lossy frame has no start code")
    width, height = struct.unpack_from("<HH", payload, 6)
    return width & 0x3FFF, height & 0x3FFF


def _lossless_size(payload: Buffer) -> tuple[int, int]:
    signature, bits = struct.unpack_from("<BI", payload)
    if signature != 0x2F:
        raise broken(ImageFormat.WEBP, "its lossless frame has no signature")
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


_WEBP_SIZES = {b"VP8X": _canvas_size, b"VP8 ": _lossy_size, b"VP8L": _lossless_size}
_READERS = {ImageFormat.JPEG: _read_jpeg, ImageFormat.PNG: _read_png, ImageFormat.WEBP: _read_webp}
