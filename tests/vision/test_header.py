"""Headers are read, and refusals named, before anything is decoded."""

import struct

import pytest

from penstock.engines.torch_serving.picture_header import MAX_PARTS, PictureFormat, sniff
from penstock.protocol.errors import UndecodableImage, UnsupportedMedia
from penstock.vision.decode import decode, read_header
from penstock.vision.spec import ColorFormat
from tests.vision import images

PICTURE = images.picture(61, 37)


@pytest.mark.parametrize(
    ("encoded", "image_format"),
    [
        (images.jpeg(PICTURE), PictureFormat.JPEG),
        (images.jpeg(PICTURE, subsampling="420"), PictureFormat.JPEG),
        (images.progressive_jpeg(PICTURE), PictureFormat.JPEG),
        (images.png(PICTURE, color_type=2), PictureFormat.PNG),
        (images.webp(PICTURE), PictureFormat.WEBP),
        (images.lossy_webp(PICTURE), PictureFormat.WEBP),
        (images.webp_with_exif(images.webp(PICTURE), 61, 37, images.exif(1)), PictureFormat.WEBP),
    ],
)
def test_header_of_a_format_that_we_take_tells_its_size(encoded: bytes, image_format: PictureFormat) -> None:
    """Format, width and height come from the bytes alone."""
    header = read_header(encoded)
    assert (header.format, header.width, header.height) == (image_format, 61, 37)
    assert sniff(encoded) is image_format


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"GIF89a" + bytes(20), "GIF"),
        (b"BM" + struct.pack("<IHHI", 100, 0, 0, 54), "BMP"),
        (b"II*\0" + bytes(20), "TIFF"),
        (b"MM\0*" + bytes(20), "TIFF"),
        (b"\0\0\0\x1cftypavif" + bytes(20), "AVIF"),
        (b"\0\0\0\x1cftypheic" + bytes(20), "HEIC"),
        (b"8BPS\0\1" + bytes(20), "Photoshop"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "PostScript"),
        (b"\xc5\xd0\xd3\xc6" + bytes(26), "PostScript"),
        (b"%PDF-1.7\n", "PDF"),
        (b"SIMPLE  =                    T", "FITS"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b'{"image": "..."}', "JSON"),
        (b"/9j/4AAQSkZJRgABAQ", "base64"),
        (b"RIFF\0\0\0\0AVI LIST", "AVI"),
        (b"hello, world", "68 65 6c 6c 6f"),
    ],
)
def test_header_of_another_format_is_refused_by_name(data: bytes, named: str) -> None:
    """What is not JPEG, PNG or WebP is unsupported, and the sentence says what it looks like."""
    with pytest.raises(UnsupportedMedia, match=named):
        read_header(data)


@pytest.mark.parametrize(
    "encoded",
    [images.jpeg(PICTURE), images.png(PICTURE, color_type=2), images.webp(PICTURE), images.lossy_webp(PICTURE)],
)
def test_header_of_a_truncated_image_is_never_another_format(encoded: bytes) -> None:
    """Cut anywhere within its first 64 bytes, an image is undecodable, not unsupported, and nothing else is raised."""
    for length in range(64):
        with pytest.raises(UndecodableImage):
            read_header(encoded[:length])


def _png_of(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _jpeg_of(*segments: bytes) -> bytes:
    return b"\xff\xd8" + b"".join(segments)


def _frame(marker: int, *, precision: int = 8, width: int = 8, height: int = 8, components: int = 3) -> bytes:
    body = struct.pack(">BHHB", precision, height, width, components) + bytes(3 * components)
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


PNG_IHDR = images.png_header(4, 4, depth=8, color_type=2)
PNG_IEND = images.png_chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "no bytes"),
        (_jpeg_of(_frame(0xC3)), "neither baseline nor progressive"),
        (_jpeg_of(_frame(0xC9)), "neither baseline nor progressive"),
        (_jpeg_of(_frame(0xC1, precision=12)), "12 bits a sample"),
        (_jpeg_of(_frame(0xC0, components=2)), "2 components"),
        (_jpeg_of(_frame(0xC0, width=0)), "0 x 8 pixels"),
        (_jpeg_of(b"\xff\xda\0\2"), "no frame header"),
        (_jpeg_of(b"\xff\xe0\xff\xff"), "65535 bytes"),
        (_jpeg_of(b"\xff\xe0\0\2garbage"), "ends inside its header"),
        (_jpeg_of(_frame(0xC2), b"\xff\xda\0\3\1" * 101), "more than 100 scans"),
        (_jpeg_of(_frame(0xC0), b"\xff\xda\0\3\1" * 101), "more than 100 scans"),
        (_jpeg_of(_frame(0xC0), _frame(0xC0)), "two frame headers"),
        (_jpeg_of(_frame(0xC0), b"\xff\xf3\0\2"), "the marker 0xf3 at byte 21"),
        (_jpeg_of(_frame(0xC0), b"\xff\xd8"), "the marker 0xd8 at byte 21"),
        (_png_of(PNG_IHDR, PNG_IEND), "no IDAT"),
        (_png_of(images.png_chunk(b"IDAT", b""), PNG_IEND), "not IHDR"),
        (_png_of(PNG_IHDR), "without its IEND"),
        (_png_of(PNG_IHDR[:-1] + b"?", PNG_IEND), "checksum"),
        (
            _png_of(images.png_header(0, 4, depth=8, color_type=2), images.png_chunk(b"IDAT", b""), PNG_IEND),
            "0 x 4 pixels",
        ),
        (images.webp_file(), "no frame header"),
        (images.webp_file(images.webp_chunk(b"VP8L", b"\0" * 8)), "without its signature"),
        (images.webp_file(images.webp_chunk(b"VP8 ", b"\0" * 12)), "without its start code"),
        (images.webp_file(images.webp_canvas(4, 4)), "truncated or corrupt"),
        (images.webp(PICTURE)[:-1], "is truncated: it has"),
    ],
)
def test_header_that_is_broken_is_refused_with_what_is_wrong(data: bytes, sentence: str) -> None:
    """Each defect of a header has its own sentence."""
    with pytest.raises(UndecodableImage, match=sentence):
        decode(data, ColorFormat.RGB)


def test_webp_whose_canvas_hides_a_larger_frame_counts_as_the_larger() -> None:
    """Neither the canvas nor the bitstream can hide pixels from the limit."""
    frame = struct.pack("<BI", 0x2F, (15999 - 1) | (15999 - 1) << 14)
    header = read_header(images.webp_file(images.webp_canvas(4, 4), images.webp_chunk(b"VP8L", frame)))
    assert (header.width, header.height) == (15999, 15999)


@pytest.mark.parametrize(
    "tiff",
    [
        b"",
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"XX*\0" + images.exif(6)[4:],
        images.exif(0),
        images.exif(9),
        images.exif(6)[:-8],
        b"MM\0*" + images.exif(6)[4:],
    ],
)
def test_exif_that_is_broken_is_ignored(tiff: bytes) -> None:
    """A photograph with broken EXIF is still a photograph: orientation 1."""
    assert read_header(images.jpeg_with_exif(images.jpeg(PICTURE), tiff)).orientation == 1


def test_png_checksum_of_pixels_is_verified() -> None:
    """One flipped bit in a chunk is found before the decoder sees it."""
    damaged = bytearray(images.png(PICTURE, color_type=2))
    damaged[200] ^= 1
    with pytest.raises(UndecodableImage, match="checksum"):
        read_header(bytes(damaged))


@pytest.mark.parametrize("kind", ["empty segments", "standalone markers", "fill bytes", "png", "webp"])
def test_header_of_too_many_parts_is_not_walked_to_its_end(kind: str) -> None:
    """An event loop reads headers, too: a megabyte of empty chunks would hold it up."""
    many = MAX_PARTS + 1
    data = {
        "empty segments": b"\xff\xd8" + b"\xff\xe2\0\2" * many,
        "standalone markers": b"\xff\xd8" + b"\xff\x01" * many,
        "fill bytes": b"\xff\xd8" + b"\xff" * many + images.jpeg(PICTURE)[2:],
        "png": images.png(PICTURE, color_type=2, before_pixels=images.png_chunk(b"teXt", b"") * many),
        "webp": images.webp_file(images.webp_chunk(b"ABCD", b"") * many),
    }[kind]
    with pytest.raises(UndecodableImage, match=f"more than {MAX_PARTS} segments or chunks"):
        read_header(data)


def test_header_behind_fill_bytes_is_read() -> None:
    """Any number of them may stand before a marker, within reason."""
    encoded = images.jpeg(PICTURE)
    header = read_header(encoded[:2] + b"\xff" * 1000 + encoded[2:])
    assert (header.width, header.height) == (61, 37)


def test_header_of_as_many_chunks_as_a_large_picture_has_is_read() -> None:
    """64 MiB in the chunks of 8 KiB that libpng writes."""
    before = images.png_chunk(b"teXt", b"") * 8192
    assert read_header(images.png(PICTURE, color_type=2, before_pixels=before)).width == 61
