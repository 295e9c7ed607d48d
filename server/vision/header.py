"""Reads headers of encoded images, and converts their errors into the gateway's (400, 413 or 415)."""

import re

from server.backends.torch_serving.picture_header import (
    MAX_PARTS,
    PNG_SIGNATURE,
    Buffer,
    PictureFormat,
    PictureHeader,
    Refused,
    png_chunks,
    sniff,
)
from server.backends.torch_serving.picture_header import read_header as _read_header
from server.core.errors import TooLarge, UndecodableImage, UnsupportedMedia

__all__ = [
    "MAX_PARTS",
    "PNG_SIGNATURE",
    "Buffer",
    "PictureFormat",
    "PictureHeader",
    "broken",
    "codec_label",
    "header_within",
    "png_chunks",
    "read_header",
    "sniff",
]

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


def codec_label(data: Buffer) -> str:
    """jpeg, png, webp or unknown, by the first bytes: a bounded label."""
    picture_format = sniff(data)
    return picture_format.value if picture_format is not None else "unknown"


def read_header(data: Buffer) -> PictureHeader:
    """Format, size and orientation, without decoding a pixel.

    Raises UnsupportedMedia for another format, naming it if possible, and UndecodableImage for a truncated or broken
    header.
    """
    if len(data) == 0:
        raise UndecodableImage("the image has no bytes; send a JPEG, PNG or WebP")
    try:
        return _read_header(data)
    except Refused as refused:
        if refused.picture_format is None:
            raise _refusal(bytes(data[:64])) from None
        raise broken(refused.picture_format, f"it {refused}") from None


def header_within(data: Buffer, max_pixels: int) -> PictureHeader:
    """As read_header. Raises TooLarge, too, for more pixels than that."""
    header = read_header(data)
    if (pixels := header.width * header.height) > max_pixels:
        raise TooLarge(f"the image has {header.width} x {header.height} = {pixels} pixels (limit {max_pixels})")
    return header


def broken(picture_format: PictureFormat, what: str) -> UndecodableImage:
    """The one sentence for an image that cannot be decoded."""
    return UndecodableImage(f"the {picture_format.upper()} image cannot be decoded: {what}")


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
