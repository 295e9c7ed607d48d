"""The kernel that prepares pictures on a GPU equals the CPU's path, given the same pixels.

Here its source runs as C++; tests/gpu/test_pictures_gpu.py holds the compiled kernel to the same.
"""

import ctypes
from dataclasses import replace

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from penstock.engines.torch_serving.picture_kernel import PixelLayout
from penstock.engines.torch_serving.picture_spec import PictureFit, PictureSpec
from penstock.vision import spec as vision
from penstock.vision.decode import DecodedImage, upright
from penstock.vision.preprocess import _tables, prepare
from tests.engines.kernel_on_cpu import compile_kernel, run_kernel
from tests.vision import images

FITS = {
    PictureFit.STRETCH: vision.ResizeMode.STRETCH,
    PictureFit.PAD_RIGHT_BOTTOM: vision.ResizeMode.PAD_RIGHT_BOTTOM,
    PictureFit.PAD_SYMMETRIC: vision.ResizeMode.PAD_SYMMETRIC,
    PictureFit.CROP: vision.ResizeMode.CROP,
}
IMAGENET = PictureSpec(
    width=56,
    height=48,
    scale=1 / 255,
    offsets=(123.675, 116.28, 103.53),
    channel_factors=(1 / 0.229, 1 / 0.224, 1 / 0.225),
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_kernel(tmp_path_factory.mktemp("kernel"))


def of_the_gateway(spec: PictureSpec) -> vision.PrepareSpec:
    """The gateway's record of the same model."""
    triples = [(numbers * 3)[:3] for numbers in (spec.offsets, spec.channel_factors)]
    return vision.PrepareSpec(
        width=spec.width,
        height=spec.height,
        color=vision.ColorFormat[spec.color],
        fit=FITS[spec.fit],
        shorter_side=spec.shorter_side,
        scale=spec.scale,
        offsets=(triples[0][0], triples[0][1], triples[0][2]),
        channel_factors=(triples[1][0], triples[1][1], triples[1][2]),
    )


def noise(width: int, height: int, seed: int = 3) -> images.Image:
    """(height, width, 3) RGB in which every pixel differs from its neighbours."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def on_the_cpu(rgb: images.Image, spec: PictureSpec, orientation: int = 1) -> npt.NDArray[np.float32]:
    """The gateway's own input for these pixels."""
    pixels = rgb[..., 1].copy() if spec.color == "GRAY" else rgb if spec.color == "RGB" else rgb[..., ::-1].copy()
    turned = upright(pixels, orientation)
    array, _ = prepare(DecodedImage(turned, turned.shape[1], turned.shape[0]), of_the_gateway(spec))
    return array


def stored(
    rgb: images.Image, spec: PictureSpec, *, is_planar: bool, orientation: int = 1
) -> tuple[images.Image, PixelLayout]:
    """The same pixels as nvJPEG (planes of RGB) or OpenCV (BGR pixels) leave them in memory."""
    height, width = rgb.shape[:2]
    if spec.color == "GRAY":
        return rgb[..., 1].copy(), PixelLayout(width, height, orientation, is_planar, 1, "GRAY")
    pixels = np.ascontiguousarray(rgb.transpose(2, 0, 1) if is_planar else rgb[..., ::-1])
    return pixels, PixelLayout(width, height, orientation, is_planar, 3, "RGB" if is_planar else "BGR")


def values_of(spec: PictureSpec) -> npt.NDArray[np.float32]:
    gateway = of_the_gateway(spec)
    tables: npt.NDArray[np.float32] = _tables(gateway.scale, gateway.offsets, gateway.channel_factors)
    return np.ascontiguousarray(tables[: spec.channels])


@pytest.mark.parametrize("fit", PictureFit)
@pytest.mark.parametrize("color", ["RGB", "BGR", "GRAY"])
@pytest.mark.parametrize("size", [(500, 375), (375, 500), (57, 301), (112, 96), (1100, 90), (90, 1900)])
def test_kernel_smaller_pictures_equal_the_cpus_path(
    kernel: ctypes.CDLL, fit: PictureFit, color: str, size: tuple[int, int]
) -> None:
    """To the last bit, however a picture is fitted, in every colour order, from planes and from pixels."""
    spec = replace(IMAGENET, fit=fit, color=color, shorter_side=60 if fit is PictureFit.CROP else 0)
    if color == "GRAY":
        spec = replace(spec, offsets=spec.offsets[:1], channel_factors=spec.channel_factors[:1])
    rgb = noise(*size)
    pictures = [stored(rgb, spec, is_planar=is_planar) for is_planar in (True, False)]
    found = run_kernel(kernel, [*pictures], values_of(spec), spec)
    expected = on_the_cpu(rgb, spec)
    np.testing.assert_array_equal(found, np.stack([expected, expected]))


@pytest.mark.parametrize("size", [(3, 2), (37, 53), (1, 1), (1, 9), (55, 47), (8, 300)])
def test_kernel_enlarged_pictures_are_within_one_level(kernel: ctypes.CDLL, size: tuple[int, int]) -> None:
    """OpenCV enlarges with another arithmetic: no value is further off than one of 255."""
    spec = replace(IMAGENET, scale=1.0, offsets=(0.0, 0.0, 0.0), channel_factors=(1.0, 1.0, 1.0))
    rgb = noise(*size)
    found = run_kernel(kernel, [stored(rgb, spec, is_planar=True)], values_of(spec), spec)
    assert np.abs(found[0] - on_the_cpu(rgb, spec)).max() <= 1.0


@pytest.mark.parametrize("fit", PictureFit)
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("is_planar", [True, False])
def test_kernel_turned_pictures_come_out_upright(
    kernel: ctypes.CDLL, fit: PictureFit, orientation: int, is_planar: bool
) -> None:
    """All eight of EXIF's orientations, by the way the bytes are walked alone."""
    spec = replace(IMAGENET, fit=fit, shorter_side=64 if fit is PictureFit.CROP else 0)
    rgb = noise(217, 143)
    found = run_kernel(kernel, [stored(rgb, spec, is_planar=is_planar, orientation=orientation)], values_of(spec), spec)
    np.testing.assert_array_equal(found[0], on_the_cpu(rgb, spec, orientation))


def test_kernel_channels_last_and_unlike_sizes_fill_each_its_row(kernel: ctypes.CDLL) -> None:
    """Pictures of unlike sizes in one launch, into a channels-last buffer; a refused one's row is black."""
    sizes = [(80, 60), (300, 200), (64, 500)]
    pictures = [stored(noise(*size, seed=i), IMAGENET, is_planar=True) for i, size in enumerate(sizes)]
    found = run_kernel(kernel, [pictures[0], None, *pictures[1:]], values_of(IMAGENET), IMAGENET, is_channels_last=True)
    black = values_of(IMAGENET)[:, 0, None, None]
    np.testing.assert_array_equal(found[1], np.broadcast_to(black, found[1].shape))
    for row, (i, size) in zip((0, 2, 3), enumerate(sizes), strict=True):
        np.testing.assert_array_equal(found[row], on_the_cpu(noise(*size, seed=i), IMAGENET))


def test_kernel_half_size_equals_the_mean_of_four(kernel: ctypes.CDLL) -> None:
    """At exactly one half OpenCV averages four pixels; so does the fixed-point arithmetic."""
    spec = replace(IMAGENET, scale=1.0, offsets=(0.0, 0.0, 0.0), channel_factors=(1.0, 1.0, 1.0))
    rgb = noise(2 * spec.width, 2 * spec.height)
    found = run_kernel(kernel, [stored(rgb, spec, is_planar=True)], values_of(spec), spec)
    small = cv2.resize(rgb, (spec.width, spec.height), interpolation=cv2.INTER_AREA)
    np.testing.assert_array_equal(found[0], small.transpose(2, 0, 1).astype(np.float32))
