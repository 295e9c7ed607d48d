"""Decodes JPEG, PNG and WebP pictures into pixel arrays.

Reads the header first. Unsupported formats are rejected with 415, corrupt pictures with 400, oversized ones with 413.
PNG data is inflated here, up to the size in the header, because libpng has no such limit.
"""

import math
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from penstock.engines.torch_serving.picture_header import MAX_PIXELS as MAX_PIXELS
from penstock.engines.torch_serving.picture_header import (
    PNG_SIGNATURE,
    Buffer,
    PictureFormat,
    PictureHeader,
    PictureRejected,
    png_chunks,
    sniff,
)
from penstock.engines.torch_serving.picture_header import read_header as _read_header
from penstock.protocol.errors import TooLarge, UndecodableImage, UnsupportedMedia
from penstock.vision.spec import ColorFormat

# Unsupported formats by their first bytes, to name them in the error.
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


def codec_label(data: Buffer) -> str:
    """The codec as a bounded metric label: jpeg, png, webp or unknown, from the first bytes."""
    picture_format = sniff(data)
    return picture_format.value if picture_format is not None else "unknown"


def read_header(data: Buffer) -> PictureHeader:
    """Format, size and orientation from the header. Raises UnsupportedMedia, UndecodableImage."""
    if len(data) == 0:
        raise UndecodableImage("the image has no bytes; send a JPEG, PNG or WebP")
    try:
        return _read_header(data)
    except PictureRejected as refused:
        if refused.picture_format is None:
            raise _refusal(bytes(data[:64])) from None
        raise broken(refused.picture_format, f"it {refused}") from None


def header_within(data: Buffer, max_pixels: int) -> PictureHeader:
    """As read_header; also raises TooLarge for more than max_pixels."""
    header = read_header(data)
    if (pixels := header.width * header.height) > max_pixels:
        raise TooLarge(f"the image has {header.width} x {header.height} = {pixels} pixels (limit {max_pixels})")
    return header


def broken(picture_format: PictureFormat, what: str) -> UndecodableImage:
    """The error for an image that cannot be decoded. what: the rest of the sentence."""
    return UndecodableImage(f"the {picture_format.upper()} image cannot be decoded: {what}")


def _refusal(head: bytes) -> UndecodableImage | UnsupportedMedia:
    if _begins_like_ours(head):
        return UndecodableImage(f"the image ends after {len(head)} bytes, inside its first marker")
    kind = next((name for pattern, name in _OTHERS if re.match(pattern, head, re.DOTALL)), None)
    what = f"this is {kind}" if kind else f"the first bytes are {head[:8].hex(' ')}"
    return UnsupportedMedia(f"not an image format that we take (JPEG, PNG, WebP): {what}")


def _begins_like_ours(head: bytes) -> bool:
    """Whether these few bytes are a truncated signature of a supported format."""
    if b"\xff\xd8\xff".startswith(head) or PNG_SIGNATURE.startswith(head):
        return True
    return len(head) < 12 and b"RIFF".startswith(head[:4]) and b"WEBP".startswith(head[8:])


_HEADER = struct.Struct(">IIBBBBB")
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_DEPTHS = frozenset((1, 2, 4, 8, 16))
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # Adam7's
_PALETTE = frozenset((b"PLTE", b"tRNS"))
_STEP_BYTES = 8 << 10  # inflated at a time: at most 8 MiB
_BLOCK_BYTES = 0xFFFF  # of a stored block
_BLOCK = struct.Struct("<BHH")
_CHUNK_OVERHEAD_BYTES, _ZLIB_OVERHEAD_BYTES = 12, 6


def with_stored_pixels(data: Buffer) -> bytearray:
    """The PNG with stored (uncompressed) pixel data. data: verified by read_header. Raises UndecodableImage."""
    header, palette, pixels = b"", bytearray(), list[Buffer]()
    for kind, payload in png_chunks(data, is_verified=True):
        if kind == b"IHDR":
            header = bytes(payload)
        elif kind in _PALETTE:
            palette += _chunk(kind, payload)
        elif kind == b"IDAT":
            pixels.append(payload)
    size_bytes = _pixel_bytes(header)
    prefix = PNG_SIGNATURE + _chunk(b"IHDR", header) + palette
    blocks = -(-size_bytes // _BLOCK_BYTES)
    stored_bytes = _ZLIB_OVERHEAD_BYTES + blocks * _BLOCK.size + size_bytes
    suffix = _chunk(b"IEND", b"")
    out = bytearray(len(prefix) + _CHUNK_OVERHEAD_BYTES + stored_bytes + len(suffix))
    begin, end = len(prefix) + 8, len(out) - len(suffix) - 4
    out[: len(prefix)], out[end + 4 :] = prefix, suffix
    with memoryview(out) as view:
        struct.pack_into(">I4s", view, len(prefix), stored_bytes, b"IDAT")
        _store(_inflated(pixels, size_bytes), view[begin:end], size_bytes)
        struct.pack_into(">I", view, end, zlib.crc32(view[begin - 4 : end]))
    return out


def _chunk(kind: bytes, payload: Buffer) -> bytes:
    body = kind + bytes(payload)
    return struct.pack(">I", len(payload)) + body + struct.pack(">I", zlib.crc32(body))


def _pixel_bytes(header: bytes) -> int:
    """Size of the pixel data in bytes, filter bytes included."""
    if len(header) != _HEADER.size:
        raise broken(PictureFormat.PNG, f"its header has {len(header)} bytes, not {_HEADER.size}")
    values: tuple[int, ...] = _HEADER.unpack(header)
    width, height, depth, color_type, _, _, interlace = values
    if color_type not in _CHANNELS or depth not in _DEPTHS or interlace > 1:
        what = f"colour type {color_type}, {depth} bits, interlace {interlace}"
        raise broken(PictureFormat.PNG, f"its header has the invalid combination {what}")
    bits = _CHANNELS[color_type] * depth
    if not interlace:
        return height * (1 + -(-width * bits // 8))
    sizes = [(-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in _PASSES]
    return sum(rows * (1 + -(-columns * bits // 8)) for columns, rows in sizes if columns > 0 and rows > 0)


def _inflated(pixels: Sequence[Buffer], size_bytes: int) -> Iterator[bytes]:
    """Pieces of size_bytes in total. Skips zlib's checksum, because the chunks' checksums were verified."""
    head = b"".join(bytes(payload[:2]) for payload in pixels)[:2]
    if len(head) < 2 or head[0] & 15 != 8 or head[1] & 32 or int.from_bytes(head, "big") % 31:
        raise broken(PictureFormat.PNG, "its pixel data is truncated or corrupt")
    inflator = zlib.decompressobj(-zlib.MAX_WBITS)
    left, skip = size_bytes, 2
    for payload in pixels:
        skip, first = max(skip - len(payload), 0), skip
        for begin in range(first, len(payload), _STEP_BYTES):
            try:
                piece = inflator.decompress(payload[begin : begin + _STEP_BYTES], left + 1)
            except zlib.error:
                raise broken(PictureFormat.PNG, "its pixel data is truncated or corrupt") from None
            left -= len(piece)
            if left < 0:
                raise broken(PictureFormat.PNG, f"its pixel data is longer than the {size_bytes} bytes of its size")
            yield piece
    if left:
        raise broken(PictureFormat.PNG, "its pixel data is truncated or corrupt")


def _store(pieces: Iterable[bytes], view: memoryview, size_bytes: int) -> None:
    """Writes the pieces as a zlib stream of stored blocks."""
    view[:2] = b"\x78\x01"
    position, block_left, left, checksum = 2, 0, size_bytes, 1
    for piece in pieces:
        checksum = zlib.adler32(piece, checksum)
        begin = 0
        while begin < len(piece):
            if not block_left:
                block_left = min(left, _BLOCK_BYTES)
                _BLOCK.pack_into(view, position, left <= _BLOCK_BYTES, block_left, block_left ^ 0xFFFF)
                position += _BLOCK.size
            count = min(block_left, len(piece) - begin)
            view[position : position + count] = piece[begin : begin + count]
            position, begin, block_left, left = position + count, begin + count, block_left - count, left - count
    struct.pack_into(">I", view, position, checksum)


Image = npt.NDArray[np.uint8]


def upright(image: Image, orientation: int) -> Image:
    """The image with EXIF's orientation applied: (H, W[, C]), C-contiguous."""
    turn = _ORIENTATIONS.get(orientation)
    return image if turn is None else turn(image)


def _transverse(image: Image) -> Image:
    turned: Image = cv2.flip(cv2.transpose(image), -1)
    return turned


# EXIF 2.32, tag 274.
_ORIENTATIONS: dict[int, Callable[[Image], Image]] = {
    2: lambda image: cv2.flip(image, 1),
    3: lambda image: cv2.flip(image, -1),
    4: lambda image: cv2.flip(image, 0),
    5: cv2.transpose,
    6: lambda image: cv2.rotate(image, cv2.ROTATE_90_CLOCKWISE),
    7: _transverse,
    8: lambda image: cv2.rotate(image, cv2.ROTATE_90_COUNTERCLOCKWISE),
}


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A decoded image; the source's size exceeds that of pixels after a scaled decode."""

    pixels: Image  # (H, W, 3) in the requested colour order or (H, W) for GRAY, C-contiguous, upright
    source_width: int  # of the full upright image
    source_height: int


def decode(
    data: Buffer, color: ColorFormat, *, max_pixels: int = MAX_PIXELS, at_least: tuple[int, int] | None = None
) -> DecodedImage:
    """Decodes an image. at_least: minimum (width, height) for a scaled decode, or None. Raises as header_within."""
    header = header_within(data, max_pixels)
    if header.format is PictureFormat.JPEG:
        stored = _decode_jpeg(data, color, _reduction(header, at_least), header)
    else:
        stored = _decode_with_opencv(data, color, header)
    return DecodedImage(upright(stored, header.orientation), *header.upright_size)


def _reduction(header: PictureHeader, at_least: tuple[int, int] | None) -> int:
    """Denominator of the scaled decode. libjpeg-turbo has fast code for powers of two."""
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
    """The data without those ranges: simplejpeg treats libjpeg-turbo's warning about stray bytes as an error."""
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
