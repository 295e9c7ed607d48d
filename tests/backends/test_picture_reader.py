"""Encoded pictures to a program's input on the CPU, where torch is installed; on the GPU: tests/gpu."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make gpu` builds the environment that has it")
pytest.importorskip("torchvision", reason="torchvision is not installed")

from server.backends.torch_serving.pictures import PictureReader, pieces, value_table  # noqa: E402  behind the skip
from server.backends.torch_serving.pictures_spec import Fit  # noqa: E402
from server.vision.decode import decode  # noqa: E402
from server.vision.preprocess import _tables, prepare  # noqa: E402
from tests.backends.test_picture_kernel import IMAGENET, of_the_gateway  # noqa: E402
from tests.vision import images  # noqa: E402

PICTURE = images.picture(301, 217)
ENCODED = {
    "jpeg": images.jpeg(PICTURE),
    "420": images.jpeg(PICTURE, subsampling="420"),
    "turned jpeg": images.jpeg_with_exif(images.jpeg(PICTURE), images.exif(6)),
    "progressive": images.progressive_jpeg(PICTURE),
    "png": images.png(PICTURE, color_type=2),
    "webp": images.webp(PICTURE),
}


@pytest.mark.parametrize("fit", Fit)
@pytest.mark.parametrize("color", ["RGB", "BGR", "GRAY"])
@pytest.mark.parametrize("name", ENCODED)
def test_prepare_on_a_cpu_equals_the_gateways_path(name: str, color: str, fit: Fit) -> None:
    """Of every format, fit and colour order: the same numbers, as both decode by libjpeg-turbo and OpenCV."""
    spec = replace(IMAGENET, color=color, fit=fit, shorter_side=60 if fit is Fit.CROP else 0)
    if color == "GRAY":
        spec = replace(spec, offsets=spec.offsets[:1], channel_factors=spec.channel_factors[:1])
    out = torch.full((2, spec.channels, spec.height, spec.width), 7.0)
    assert PictureReader(spec, torch.device("cpu")).prepare([ENCODED[name]], out) == [None]
    gateway = of_the_gateway(spec)
    expected, _ = prepare(decode(ENCODED[name], gateway.color), gateway)
    np.testing.assert_array_equal(out[0].numpy(), expected)
    assert (out[1] == 7.0).all()


def test_prepare_one_of_three_is_no_picture_the_others_are_served() -> None:
    """Its row is black and its sentence says why; the rows of its batch-mates are their own."""
    out = torch.full((3, 3, 48, 56), 7.0).to(memory_format=torch.channels_last)
    reader = PictureReader(IMAGENET, torch.device("cpu"))
    errors = reader.prepare([ENCODED["jpeg"], b"GIF89a", ENCODED["png"]], out)
    assert (errors[0], errors[2]) == (None, None)
    assert errors[1] == "the picture is no JPEG, PNG or WebP: its first bytes are 47 49 46 38 39 61"
    black = value_table(IMAGENET)[:, :1, None].expand(3, 48, 56)
    assert torch.equal(out[1], black)
    assert not torch.equal(out[0], black)
    assert not torch.equal(out[2], black)


def test_prepare_more_pixels_than_allowed_is_refused_before_decoding() -> None:
    """The header's size is enough to say no."""
    out = torch.empty((1, 3, 48, 56))
    reader = PictureReader(IMAGENET, torch.device("cpu"), max_pixels=1000)
    assert reader.prepare([ENCODED["jpeg"]], out) == ["the picture has 301 x 217 = 65317 pixels (limit 1000)"]


def test_value_table_equals_the_gateways() -> None:
    """What each pixel value becomes, to the last bit."""
    gateway = of_the_gateway(IMAGENET)
    expected = _tables(gateway.scale, gateway.offsets, gateway.channel_factors)
    np.testing.assert_array_equal(value_table(IMAGENET).numpy(), expected)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([99], [(0, 1)]),
        ([4, 4, 4], [(0, 2), (2, 3)]),
        ([99, 1, 99], [(0, 1), (1, 2), (2, 3)]),
        ([0, 10, 0, 1], [(0, 3), (3, 4)]),
    ],
)
def test_pieces_hold_at_most_the_limit_or_one(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    """Consecutive, complete, and no larger than the memory they are meant for."""
    assert list(pieces(sizes, 10)) == expected
