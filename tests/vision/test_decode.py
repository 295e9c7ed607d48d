"""Every case that the formats hold comes out as decode.py's docstring defines, or is refused with a sentence."""

import re
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg

from penstock.protocol.errors import TooLarge, UndecodableImage, UnsupportedMedia
from penstock.vision.decode import decode
from penstock.vision.spec import ColorFormat
from tests.vision import images
from tests.vision.images import Image

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "vision"
PICTURE = images.picture(61, 37)


def rgb(encoded: bytes) -> Image:
    return decode(encoded, ColorFormat.RGB).pixels


def largest_difference(left: Image, right: Image) -> int:
    assert left.shape == right.shape
    return int(np.abs(left.astype(int) - right.astype(int)).max())


# colour ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encode", "tolerance"),
    [
        (images.jpeg, 12),
        (images.progressive_jpeg, 30),  # OpenCV's encoder subsamples the colours
        (lambda picture: images.png(picture, color_type=2), 0),
        (images.webp, 0),
        (images.lossy_webp, 40),  # 4:2:0
    ],
)
def test_decode_gives_the_colours_in_the_order_asked(encode: Callable[[Image], bytes], tolerance: int) -> None:
    """RGB and BGR are the same pixels in the two orders; GRAY is one plane of their luma."""
    encoded = encode(PICTURE)
    red_first = rgb(encoded)
    blue_first = decode(encoded, ColorFormat.BGR).pixels
    grey = decode(encoded, ColorFormat.GRAY).pixels
    assert largest_difference(red_first, PICTURE) <= tolerance
    assert np.array_equal(blue_first, red_first[..., ::-1])
    assert grey.shape == (37, 61)
    assert largest_difference(grey, cv2.cvtColor(red_first, cv2.COLOR_RGB2GRAY)) <= 2
    for pixels in (red_first, blue_first, grey):
        assert pixels.dtype == np.uint8
        assert pixels.flags.c_contiguous


def test_decode_of_a_progressive_jpeg_equals_the_baseline_one() -> None:
    """The same coefficients in another order are the same picture."""
    baseline = bytes(cv2.imencode(".jpg", PICTURE[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])[1])
    assert np.array_equal(rgb(images.progressive_jpeg(PICTURE)), rgb(baseline))


def test_decode_of_a_grey_jpeg_gives_three_equal_channels() -> None:
    """Grey images serve colour networks."""
    encoded = bytes(cv2.imencode(".jpg", PICTURE[..., 0], [cv2.IMWRITE_JPEG_QUALITY, 100])[1])
    pixels = rgb(encoded)
    assert np.array_equal(pixels[..., 0], pixels[..., 1])
    assert np.array_equal(pixels[..., 0], pixels[..., 2])
    assert largest_difference(decode(encoded, ColorFormat.GRAY).pixels, PICTURE[..., 0]) <= 2


def test_decode_of_a_cmyk_jpeg_equals_pillow() -> None:
    """The golden file was written by Pillow 13.0.0 (Adobe's inverted CMYK), its pixels by Pillow's convert("RGB")."""
    expected = rgb((GOLDEN / "cmyk_adobe.png").read_bytes())
    assert largest_difference(rgb((GOLDEN / "cmyk_adobe.jpg").read_bytes()), expected) <= 1


def test_decode_of_a_ycck_jpeg_multiplies_the_inks_with_black() -> None:
    """YCCK is CMYK after a colour transform: channel = ink * black / 255, inks inverted as Adobe stores them."""
    inks = np.dstack([PICTURE, 255 - PICTURE[..., 0] // 2])
    encoded = simplejpeg.encode_jpeg(np.ascontiguousarray(inks), quality=100, colorspace="CMYK", colorsubsampling="444")
    expected = (inks[..., :3].astype(int) * inks[..., 3:] // 255).astype(np.uint8)
    assert largest_difference(rgb(encoded), expected) <= 6


def test_decode_of_sixteen_bits_takes_the_high_byte() -> None:
    """value >> 8, for colour and for grey."""
    deep = np.random.default_rng(3).integers(0, 65536, (9, 11, 3), np.uint16)
    assert np.array_equal(rgb(images.png(deep, color_type=2)), (deep >> 8).astype(np.uint8))
    grey = rgb(images.png(deep[..., 0], color_type=0))
    assert np.array_equal(grey, np.repeat((deep[..., :1] >> 8).astype(np.uint8), 3, axis=2))


@pytest.mark.parametrize("image_format", ["png", "webp"])
def test_decode_drops_alpha_and_keeps_the_colours_as_stored(image_format: str) -> None:
    """Transparency changes nothing: neither white nor black is mixed in."""
    alpha = np.arange(37 * 61, dtype=np.uint32).reshape(37, 61) % 255 + 1
    samples = np.dstack([PICTURE, alpha.astype(np.uint8)])
    encoded = images.png(samples, color_type=6)
    if image_format == "webp":
        encoded = bytes(cv2.imencode(".webp", cv2.cvtColor(samples, cv2.COLOR_RGBA2BGRA))[1])
    assert np.array_equal(rgb(encoded), PICTURE)


def test_decode_of_grey_with_alpha_drops_alpha() -> None:
    """PNG colour type 4."""
    samples = np.dstack([PICTURE[..., 0], PICTURE[..., 1]])
    assert np.array_equal(rgb(images.png(samples, color_type=4)), np.repeat(PICTURE[..., :1], 3, axis=2))


def test_decode_of_a_palette_resolves_it() -> None:
    """Indexed PNG, with transparency of its entries, which is dropped."""
    palette = np.random.default_rng(4).integers(0, 256, (16, 3), np.uint8)
    index = np.random.default_rng(5).integers(0, 16, (20, 30), np.uint8)
    tables = images.png_chunk(b"PLTE", palette.tobytes()) + images.png_chunk(b"tRNS", bytes(range(16)))
    assert np.array_equal(rgb(images.png(index, color_type=3, before_pixels=tables)), palette[index])


def test_decode_ignores_png_gamma() -> None:
    """A gAMA chunk changes no pixel."""
    gamma = images.png_chunk(b"gAMA", (20000).to_bytes(4, "big"))
    assert np.array_equal(rgb(images.png(PICTURE, color_type=2, before_pixels=gamma)), PICTURE)


@pytest.mark.parametrize("suffix", [".png", ".webp"])
def test_decode_of_an_animation_gives_its_first_frame(suffix: str) -> None:
    """APNG and animated WebP are taken as the still image that they begin with."""
    animation = cv2.Animation()
    animation.frames = [np.full((40, 60, 4), value, np.uint8) for value in (50, 200)]
    animation.durations = np.array([100, 100], np.int32)
    encoded = bytes(cv2.imencodeanimation(suffix, animation)[1])
    assert largest_difference(rgb(encoded), np.full((40, 60, 3), 50, np.uint8)) <= 1


# size and orientation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 17), (17, 1), (3, 5), (8, 8), (9, 7), (16, 15)])
def test_decode_of_odd_sizes_gives_every_pixel(width: int, height: int) -> None:
    """From one pixel on, in every format, subsampled or not."""
    picture = images.picture(width, height)
    for encoded in (
        images.jpeg(picture),
        images.jpeg(picture, subsampling="420"),
        images.jpeg(picture, subsampling="411"),
        images.progressive_jpeg(picture),
        images.png(picture, color_type=2),
        images.webp(picture),
        images.lossy_webp(picture),
    ):
        decoded = decode(encoded, ColorFormat.RGB)
        assert decoded.pixels.shape == (height, width, 3)
        assert (decoded.source_width, decoded.source_height) == (width, height)
    assert np.array_equal(rgb(images.png(picture, color_type=2)), picture)


UPRIGHT: dict[int, Callable[[Image], Image]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].transpose(1, 0, 2),
    8: lambda stored: np.rot90(stored, 1),
}


@pytest.mark.parametrize("orientation", sorted(UPRIGHT))
@pytest.mark.parametrize("order", ["<", ">"])
def test_decode_turns_the_image_as_exif_asks(orientation: int, order: str) -> None:
    """All eight orientations, in all three formats, in both byte orders; sizes are those that a person sees."""
    tiff = images.exif(orientation, order=order)
    stored = rgb(images.jpeg(PICTURE))
    cases = [
        (images.jpeg_with_exif(images.jpeg(PICTURE), tiff), stored),
        (images.png(PICTURE, color_type=2, before_pixels=images.png_chunk(b"eXIf", tiff)), PICTURE),
        (images.webp_with_exif(images.webp(PICTURE), 61, 37, tiff), PICTURE),
        (images.webp_with_exif(images.webp(PICTURE), 61, 37, b"Exif\0\0" + tiff), PICTURE),
    ]
    for encoded, untouched in cases:
        decoded = decode(encoded, ColorFormat.RGB)
        assert np.array_equal(decoded.pixels, UPRIGHT[orientation](untouched))
        assert decoded.pixels.flags.c_contiguous
        assert (decoded.source_height, decoded.source_width) == decoded.pixels.shape[:2]


def test_decode_at_a_fraction_keeps_the_least_size_and_tells_the_source_size() -> None:
    """The largest of 1/8, 1/4, 1/2 that is still enough, also for an image that lies on its side."""
    encoded = images.jpeg(images.picture(640, 480))
    for at_least, shape in [
        ((80, 60), (60, 80)),
        ((81, 60), (120, 160)),
        ((200, 200), (240, 320)),
        ((321, 9), (480, 640)),
    ]:
        decoded = decode(encoded, ColorFormat.RGB, at_least=at_least)
        assert decoded.pixels.shape == (*shape, 3)
        assert (decoded.source_width, decoded.source_height) == (640, 480)
    sideways = decode(images.jpeg_with_exif(encoded, images.exif(6)), ColorFormat.RGB, at_least=(60, 80))
    assert sideways.pixels.shape == (80, 60, 3)
    assert (sideways.source_width, sideways.source_height) == (480, 640)


# refusals -------------------------------------------------------------------------------------------------------------


def test_decode_over_the_pixel_limit_names_the_size() -> None:
    """The limit is of pixels, not of bytes, and inclusive."""
    encoded = images.jpeg(PICTURE)
    assert decode(encoded, ColorFormat.RGB, max_pixels=61 * 37).pixels.shape == (37, 61, 3)
    with pytest.raises(TooLarge, match=re.escape("61 x 37 = 2257 pixels (limit 2256)")):
        decode(encoded, ColorFormat.RGB, max_pixels=61 * 37 - 1)


CORPUS = {
    "jpeg": images.jpeg(images.picture(40, 30), quality=80, subsampling="420"),
    "progressive": images.progressive_jpeg(images.picture(40, 30)),
    "png": images.png(images.picture(20, 15), color_type=2),
    "webp": images.webp(images.picture(40, 30)),
    "lossy webp": images.lossy_webp(images.picture(40, 30)),
}


@pytest.mark.parametrize("name", CORPUS)
def test_decode_of_a_truncated_image_is_refused_wherever_it_ends(name: str) -> None:
    """Not half grey: every proper beginning of a file is undecodable."""
    encoded = CORPUS[name]
    for length in range(0, len(encoded), 3):
        with pytest.raises(UndecodableImage):
            decode(encoded[:length], ColorFormat.RGB)
    with pytest.raises(UndecodableImage):
        decode(encoded[:-1], ColorFormat.RGB)


@pytest.mark.parametrize("name", CORPUS)
def test_decode_of_a_damaged_image_decodes_or_is_refused(name: str) -> None:
    """Seeded bit flips: pixels, or an error of the gateway's own, and nothing else."""
    generator = np.random.default_rng(7)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(CORPUS[name])
        for position in generator.integers(0, len(damaged), generator.integers(1, 4)):
            damaged[position] ^= 1 << int(generator.integers(8))
        try:
            pixels = decode(bytes(damaged), ColorFormat.RGB, max_pixels=1_000_000).pixels
        except (UndecodableImage, TooLarge, UnsupportedMedia) as error:
            outcomes.add(type(error))
        else:
            outcomes.add(type(pixels))
            assert pixels.ndim == 3
    assert UndecodableImage in outcomes


def test_decode_of_a_png_with_too_few_rows_is_refused() -> None:
    """Right checksums around pixel data that ends early."""
    whole = images.png(PICTURE, color_type=2)
    short = images.png(PICTURE[:20], color_type=2)
    header_end = 8 + 25
    with pytest.raises(UndecodableImage, match="truncated or corrupt"):
        rgb(whole[:header_end] + short[header_end:])


def test_decode_of_bytes_after_the_end_of_a_jpeg_ignores_them() -> None:
    """Phones put a second picture behind the first."""
    encoded = images.jpeg(PICTURE)
    assert np.array_equal(rgb(encoded + encoded), rgb(encoded))
