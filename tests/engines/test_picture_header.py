"""The parser of picture headers accepts what the decoders accept, and selects the decoder."""

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from penstock.engines.torch_serving.picture_header import PictureFormat, PictureRejected, read_header
from penstock.protocol.errors import UndecodableImage
from penstock.vision.decode import decode
from penstock.vision.spec import ColorFormat
from tests.vision import images

PICTURE = images.picture(61, 43)
JPEG = images.jpeg(PICTURE)
SIZE = PICTURE.shape[1], PICTURE.shape[0]


@dataclass(frozen=True)
class Sample:
    """A picture of SIZE."""

    encoded: bytes
    is_for_gpu: bool = False
    format: PictureFormat = PictureFormat.JPEG
    orientation: int = 1


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
    "stray bytes": Sample(JPEG[:20] + b"\0\0\0" + JPEG[20:]),
    "png": Sample(images.png(PICTURE, color_type=2), format=PictureFormat.PNG),
    "png with exif": Sample(
        images.png(PICTURE, color_type=2, before_pixels=images.png_chunk(b"eXIf", images.exif(3, order=">"))),
        format=PictureFormat.PNG,
        orientation=3,
    ),
    "webp": Sample(images.webp(PICTURE), format=PictureFormat.WEBP),
    "lossy webp": Sample(images.lossy_webp(PICTURE), format=PictureFormat.WEBP),
    "webp with exif": Sample(
        images.webp_with_exif(images.webp(PICTURE), *SIZE, images.exif(6)), format=PictureFormat.WEBP, orientation=6
    ),
    **{
        f"orientation {orientation}": Sample(
            images.jpeg_with_exif(JPEG, images.exif(orientation, order="<>"[orientation % 2])),
            is_for_gpu=True,
            orientation=orientation if 1 <= orientation <= 8 else 1,
        )
        for orientation in range(10)
    },
    "broken exif": Sample(images.jpeg_with_exif(JPEG, b"II*\0\xff\xff\xff\xff"), is_for_gpu=True),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_header_of_a_picture_has_its_size_and_picks_its_decoder(name: str) -> None:
    """nvJPEG gets the JPEGs that its hardware certainly decodes, and nothing else."""
    sample = SAMPLES[name]
    header = read_header(sample.encoded)
    assert (header.width, header.height) == SIZE
    assert (header.format, header.orientation) == (sample.format, sample.orientation)
    assert header.is_for_gpu == sample.is_for_gpu


REFUSED = {
    "nothing": (b"", "first bytes are none"),
    "a GIF": (b"GIF89a" + bytes(40), "47 49 46"),
    "a stump of a JPEG": (JPEG[:9], "truncated"),
    "a JPEG that ends before its frame": (b"\xff\xd8\xff\xd9" + bytes(20), "frame header"),
    "a JPEG of 12 bits": (JPEG.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"), "12 bits"),
    "a lossless JPEG": (JPEG.replace(b"\xff\xc0\x00\x11", b"\xff\xc3\x00\x11"), "coding .marker 0xc3"),
    "a cut PNG": (images.png(PICTURE, color_type=2)[:-6], "truncated"),
    "a cut WebP": (images.webp(PICTURE)[:-6], "truncated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_header_of_what_is_no_picture_is_refused_with_a_reason(name: str) -> None:
    """Each reason completes a sentence whose subject is the picture."""
    encoded, reason = REFUSED[name]
    with pytest.raises(PictureRejected, match=reason):
        read_header(encoded)


# Agreement with the decoders ------------------------------------------------------------------------------------------

BASES = {
    "baseline": JPEG,
    "420": images.jpeg(PICTURE, subsampling="420"),
    "grey": bytes(cv2.imencode(".jpg", PICTURE[..., 0])[1]),
    "progressive": images.progressive_jpeg(PICTURE),
    "Adobe": adobe(JPEG, 1),
}
BETWEEN = (
    *(b"", b"\0", b"\0\0\0", b"stray", b"\xff\x00", b"a\xff\x00b\xff\xff\x00", b"\xff\xff\xff"),  # stray and fill bytes
    *(b"\xff\x01", b"\xff\xd0", b"\xff\xd7\xff\xd3"),  # markers without a segment
    *(b"\xff" + bytes([marker]) + b"\0\4ab" for marker in (0xE0, 0xE1, 0xE2, 0xEE, 0xEF, 0xFE, 0xDC)),
    *(b"\xff" + bytes([marker]) + b"\0\2" for marker in (0xCC, 0xC8, 0x02, 0xBF, 0xF0, 0xFD, 0xDE, 0xDF)),
    *(b"\xff\xd8", b"\xff\xd9", b"\xff\xe2\0\1", b"\xff\xe2\0\0", b"\xff\xe2\xff\xff"),
)


def segments(encoded: bytes) -> list[bytes]:
    """The parts of a JPEG: each segment before the first scan, and the rest."""
    position, pieces = 2, [encoded[:2]]
    while encoded[position + 1] != 0xDA:
        end = position + 2 + int.from_bytes(encoded[position + 2 : position + 4], "big")
        pieces.append(encoded[position:end])
        position = end
    return [*pieces, encoded[position:]]


def is_decoded_by_libjpeg_turbo(encoded: bytes) -> bool:
    """OpenCV's build of it does not treat warnings as errors."""
    return cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB) is not None


def decoded_by_the_gateway(encoded: bytes) -> npt.NDArray[np.uint8] | None:
    """The decoded picture; None if it is refused."""
    try:
        return decode(encoded, ColorFormat.RGB).pixels
    except UndecodableImage:
        return None


@pytest.mark.parametrize("name", BASES)
def test_header_and_decoders_agree_on_what_lies_between_segments(name: str) -> None:
    """The parser and the gateway's decoder accept exactly what libjpeg-turbo accepts, with the same pixels."""
    generator = np.random.default_rng(41)
    pieces = segments(BASES[name])
    pixels = decode(BASES[name], ColorFormat.RGB).pixels
    outcomes = set()
    for number in range(len(BETWEEN) * (len(pieces) - 1) + 300):
        between = [b""] * len(pieces)
        if number < len(BETWEEN) * (len(pieces) - 1):  # each alone in each position, then some at random
            between[number // len(BETWEEN)] = BETWEEN[number % len(BETWEEN)]
        else:
            for place in generator.integers(0, len(pieces) - 1, 3):
                between[place] += BETWEEN[generator.integers(len(BETWEEN))]
        between[-1] = b""
        encoded = b"".join(piece + more for piece, more in zip(pieces, between, strict=True))
        if encoded[2] != 0xFF:
            continue  # another format by its first bytes
        is_taken = is_decoded_by_libjpeg_turbo(encoded)
        outcomes.add(is_taken)
        decoded = decoded_by_the_gateway(encoded)
        assert (decoded is not None) == is_taken, between
        if decoded is not None:
            header = read_header(encoded)
            assert (header.width, header.height) == SIZE
            assert np.array_equal(decoded, pixels), between
    assert outcomes == {True, False}


def test_header_of_every_cut_of_a_picture_is_a_refusal_or_a_header() -> None:
    """Wherever a file ends, nothing else than Refused is raised."""
    for sample in SAMPLES.values():
        for end in range(0, len(sample.encoded), 7):
            try:
                read_header(sample.encoded[:end])
            except PictureRejected:
                continue
