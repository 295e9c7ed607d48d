"""What the engine reads of an encoded picture agrees with the gateway's own reader, and picks the decoder."""

from dataclasses import dataclass

import cv2
import pytest

from server.backends.torch_serving.picture_header import Refused, read_header
from server.core.errors import InferenceError
from server.vision import header as vision
from tests.vision import images

PICTURE = images.picture(61, 43)
JPEG = images.jpeg(PICTURE)
SIZE = PICTURE.shape[1], PICTURE.shape[0]


@dataclass(frozen=True)
class Sample:
    encoded: bytes
    is_for_gpu: bool = False


def adobe(encoded: bytes, transform: int) -> bytes:
    """The JPEG with Adobe's marker in place of JFIF's."""
    jfif_end = 4 + int.from_bytes(encoded[4:6], "big")
    return encoded[:2] + b"\xff\xee\x00\x0eAdobe\x00\x64\0\0\0\0" + bytes([transform]) + encoded[jfif_end:]


def sampled(factors: int) -> bytes:
    parameters = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors]
    return bytes(cv2.imencode(".jpg", PICTURE, parameters)[1])


SAMPLES = {
    "baseline": Sample(JPEG, is_for_gpu=True),
    "420": Sample(images.jpeg(PICTURE, subsampling="420"), is_for_gpu=True),
    "422": Sample(sampled(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422), is_for_gpu=True),
    "440": Sample(sampled(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440), is_for_gpu=True),
    "411 is unusual": Sample(sampled(cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411)),
    "grey": Sample(bytes(cv2.imencode(".jpg", PICTURE[..., 0])[1]), is_for_gpu=True),
    "progressive": Sample(images.progressive_jpeg(PICTURE)),
    "Adobe says YCbCr": Sample(adobe(JPEG, 1), is_for_gpu=True),
    "Adobe says RGB": Sample(adobe(JPEG, 0)),
    "trailing bytes": Sample(JPEG + b"\0" * 40, is_for_gpu=True),
    "fill bytes": Sample(JPEG[:2] + b"\xff\xff" + JPEG[2:], is_for_gpu=True),
    "png": Sample(images.png(PICTURE, color_type=2)),
    "png with exif": Sample(
        images.png(PICTURE, color_type=2, before_pixels=images.png_chunk(b"eXIf", images.exif(3, order=">")))
    ),
    "webp": Sample(images.webp(PICTURE)),
    "lossy webp": Sample(images.lossy_webp(PICTURE)),
    "webp with exif": Sample(images.webp_with_exif(images.webp(PICTURE), *SIZE, images.exif(6))),
    **{
        f"orientation {orientation}": Sample(
            images.jpeg_with_exif(JPEG, images.exif(orientation, order="<>"[orientation % 2])), is_for_gpu=True
        )
        for orientation in range(10)
    },
    "broken exif": Sample(images.jpeg_with_exif(JPEG, b"II*\0\xff\xff\xff\xff"), is_for_gpu=True),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_header_agrees_with_the_gateways_reader(name: str) -> None:
    """Size and orientation are the gateway's; nvJPEG gets the JPEGs that its hardware and we are sure of."""
    sample = SAMPLES[name]
    ours, gateways = read_header(sample.encoded), vision.read_header(sample.encoded)
    assert (ours.width, ours.height, ours.orientation) == (gateways.width, gateways.height, gateways.orientation)
    assert (ours.is_for_gpu, ours.is_jpeg) == (sample.is_for_gpu, gateways.format is vision.ImageFormat.JPEG)


REFUSED = {
    "nothing": (b"", "first bytes are none"),
    "a GIF": (b"GIF89a" + bytes(40), "47 49 46"),
    "a stump of a JPEG": (JPEG[:9], "frame header"),
    "a JPEG cut in its pixels": (JPEG[: len(JPEG) // 2], "ends? without the marker that ends a JPEG"),
    "a JPEG without a marker": (JPEG[:2] + b"\xff\xe0\0\2xx" + JPEG[2:], "should begin a marker"),
    "a JPEG that ends before its frame": (b"\xff\xd8\xff\xd9" + bytes(20), "frame header"),
    "a JPEG of 12 bits": (JPEG.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"), "12 bits"),
    "a lossless JPEG": (JPEG.replace(b"\xff\xc0\x00\x11", b"\xff\xc3\x00\x11"), "coding 0xc3"),
    "a cut PNG": (images.png(PICTURE, color_type=2)[:-6], "truncated"),
    "a cut WebP": (images.webp(PICTURE)[:-6], "truncated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_header_of_what_is_no_picture_is_refused_with_a_reason(name: str) -> None:
    """Each is a sentence before a decoder has seen a byte; the gateway's reader refuses it, too, but for a cut JPEG."""
    encoded, reason = REFUSED[name]
    with pytest.raises(Refused, match=reason):
        read_header(encoded)
    if name != "a JPEG cut in its pixels":
        with pytest.raises(InferenceError):
            vision.read_header(encoded)


def test_header_of_every_cut_of_a_picture_is_a_refusal_or_a_header() -> None:
    """Wherever a file ends, nothing else than Refused is raised."""
    for sample in SAMPLES.values():
        for end in range(0, len(sample.encoded), 7):
            try:
                read_header(sample.encoded[:end])
            except Refused:
                continue
