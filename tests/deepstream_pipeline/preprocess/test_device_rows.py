"""Rows made by a card equal the CPU's. Here the kernels run as C++ on a stand-in of the driver."""

import ctypes
from dataclasses import replace

import cv2
import numpy as np
import pytest

from penstock.vision.preprocess import part_of
from penstock.vision.spec import PrepareSpec, ResizeMode, ScalingFilter
from penstock_video.errors import GpuFailed
from penstock_video.gpu.device import Device
from penstock_video.preprocess.device_rows import DevicePreparer, output_size, why_not
from penstock_video.types import DevicePicture
from tests.deepstream_pipeline.gpu.fake_driver import FakeDriver
from tests.deepstream_pipeline.gpu.kernels_on_cpu import card, compile_kernels
from tests.deepstream_pipeline.preprocess.device_pictures import LEVELS, NETWORK, Plane, made_of, noise, on_card, smooth
from tests.deepstream_pipeline.preprocess.device_row_suite import SMALLER, DeviceRowSuite


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def fake(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> tuple[Device, FakeDriver]:
    return card(library, monkeypatch)


@pytest.fixture
def device(fake: tuple[Device, FakeDriver]) -> Device:
    return fake[0]


class TestDeviceRows(DeviceRowSuite):
    """The kernels' own source, on the CPU, which takes long: fewer sizes."""

    smaller = SMALLER[1:3]


SCALED = replace(LEVELS, has_scaled_decode=True, pad_value=114.0)


@pytest.mark.parametrize(
    ("size", "spec", "expected"),
    [
        ((1920, 1080), PrepareSpec(640, 640, fit=ResizeMode.PAD_SYMMETRIC, has_scaled_decode=True), (1280, 720)),
        ((1280, 720), PrepareSpec(224, 224, has_scaled_decode=True), (798, 448)),
        ((1280, 720), PrepareSpec(224, 224), None),
        ((1280, 720), PrepareSpec(224, 224, has_scaled_decode=True, filter=ScalingFilter.NEAREST), None),
        ((1280, 720), PrepareSpec(640, 640, has_scaled_decode=True), None),
        ((1280, 720), None, None),
    ],
)
def test_decoder_scales_only_for_models_that_allow_it_and_large_pictures(
    size: tuple[int, int], spec: PrepareSpec | None, expected: tuple[int, int] | None
) -> None:
    """To twice what the network shows, in the shape of the picture, so that letterboxing stays right."""
    assert output_size(size, spec) == expected


@pytest.mark.parametrize("fit", [ResizeMode.STRETCH, ResizeMode.PAD_SYMMETRIC, ResizeMode.PAD_RIGHT_BOTTOM])
def test_row_of_a_scaled_picture_is_near_the_cpus_with_the_same_padding(device: Device, fit: ResizeMode) -> None:
    """Its content is in the same place: smooth pictures differ by a few levels of 255 at most."""
    stored, spec = smooth(640, 360), replace(SCALED, fit=fit)
    size = output_size((640, 360), spec)
    assert size is not None
    small = replace(stored, luma=resized(stored.luma, *size), blue=resized(stored.blue, size[0] // 2, size[1] // 2))
    small = replace(small, red=resized(stored.red, size[0] // 2, size[1] // 2))
    expected, stream, preparer = stored.row(spec), device.new_stream(), DevicePreparer(device, spec)
    row = np.zeros(expected.nbytes, np.uint8)
    with on_card(device, small, stream) as picture:
        made = preparer.prepare(picture._replace(source_size=(640, 360)), row=row)
    preparer.close()
    assert made.row_shape == expected.shape
    apart = np.abs(row.reshape(expected.shape).astype(int) - expected)
    assert apart.max() <= 6
    assert apart.mean() <= 1.0
    part = part_of(640, 360, spec)
    is_padding = np.ones(expected.shape[1], bool)
    is_padding[part.pad_y : part.pad_y + part.resized_height] = False
    assert is_padding.any() == (fit is not ResizeMode.STRETCH)
    assert not apart[:, is_padding].any()


def resized(plane: Plane, width: int, height: int) -> Plane:
    """The plane, scaled as a decoder may scale it."""
    return cv2.resize(plane, (width, height), interpolation=cv2.INTER_AREA)


def test_why_not_names_the_filter() -> None:
    """Bilinear and nearest are made on a card; the others have a readable reason."""
    for wanted in (ScalingFilter.BILINEAR, ScalingFilter.NEAREST):
        assert why_not(PrepareSpec(8, 8, filter=wanted)) == ""
    for wanted in (ScalingFilter.AREA, ScalingFilter.CUBIC):
        assert wanted.name.lower() in why_not(PrepareSpec(8, 8, filter=wanted))


def test_why_not_names_a_padding_between_two_pixel_values() -> None:
    """The kernels look the padding up by its pixel value; another one is made by the CPU."""
    padded = PrepareSpec(8, 8, fit=ResizeMode.PAD_SYMMETRIC, pad_value=114.0)
    assert why_not(padded) == ""
    assert why_not(replace(padded, pad_value=127.5)).startswith("its padding is 127.5, and a GPU pads with whole")


def test_prepare_of_pictures_alike_makes_two_launches_and_one_wait(fake: tuple[Device, FakeDriver]) -> None:
    """Nothing is allocated or packed anew for a picture like the one before."""
    device, driver = fake
    preparer, stored = DevicePreparer(device, NETWORK), noise(64, 36)
    nv12 = np.concatenate([stored.luma, np.stack([stored.blue, stored.red], axis=-1).reshape(18, 64)])
    picture = DevicePicture(nv12.ctypes.data, nv12.ctypes.data + 64 * 36, 64, 64, 36, 5)
    row, image = np.zeros(NETWORK.row_bytes, np.uint8), np.zeros((36, 64, 3), np.uint8)
    preparer.prepare(picture, row=row, image=image)
    driver.calls.clear()
    preparer.prepare(picture, row=row, image=image)
    row_and_thumbnail = ["cuLaunchKernel", "cuMemcpyAsync", "cuMemcpyAsync"]
    picture_itself = ["cuLaunchKernel", "cuMemcpyAsync"]
    assert driver.calls == [*row_and_thumbnail, *picture_itself, "cuStreamQuery"]
    preparer.close()
    assert driver.is_all_given_back


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuMemcpyAsync", "cuStreamQuery", "cuMemAlloc"])
def test_prepare_on_a_card_that_fails_raises_cudas_word(fake: tuple[Device, FakeDriver], function: str) -> None:
    """A fault of the card is the camera's error, not the program's end; what was held is given back."""
    device, driver = fake
    preparer = DevicePreparer(device, NETWORK)
    driver.fail(function, "CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(GpuFailed, match="CUDA_ERROR_LAUNCH_FAILED"):
        preparer.prepare(DevicePicture(0, 0, 64, 64, 36, 5), row=0)
    preparer.close()
    assert driver.is_all_given_back


def test_prepare_into_a_place_of_another_size_is_refused(fake: tuple[Device, FakeDriver]) -> None:
    """A fault of the program: nothing is written beyond an array's end."""
    device, stored = fake[0], noise(64, 36)
    row = np.zeros(NETWORK.row_bytes, np.uint8)
    with pytest.raises(ValueError, match=rf"the row has {NETWORK.row_bytes} bytes"):
        made_of(device, stored, NETWORK, row[1:])
    with pytest.raises(ValueError, match=r"the picture is \(36, 64, 3\)"):
        made_of(device, stored, NETWORK, row, np.zeros((64, 36, 3), np.uint8))
    with pytest.raises(ValueError, match="without a network"):
        made_of(device, stored, None, row)
