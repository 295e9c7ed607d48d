"""nvJPEG's binding, tried with stand-ins of the library and of the driver; tests/gpu tries real ones."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import simplejpeg

from penstock_video.errors import GpuFailed, GpuUnavailable
from penstock_video.gpu.device import Device
from penstock_video.sinks import jpeg as nvjpeg
from penstock_video.sinks.jpeg import NvJpeg
from tests.deepstream_pipeline.gpu.fake_driver import FakeDriver, install


class FakeNvjpeg:
    """A stand-in for libnvjpeg: the same functions with the same arguments, libjpeg-turbo inside, handles counted.

    `failing` is the function that answers 6 (EXECUTION_FAILED).
    """

    def __init__(self) -> None:
        self.failing = ""
        self.handles: set[int] = set()
        self.quality = self.chroma = 0
        self.jpeg = b""
        self._next = 0x100

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvjpeg") and name == self.failing:
            return lambda *arguments: 6
        return super().__getattribute__(name)

    def _made(self, place: Any) -> int:
        self._next += 1
        self.handles.add(self._next)
        place._obj.value = self._next
        return 0

    def _gone(self, handle: ctypes.c_void_p) -> int:
        assert handle.value is not None
        self.handles.remove(handle.value)
        return 0

    def nvjpegCreateSimple(self, handle: Any) -> int:
        return self._made(handle)

    def nvjpegEncoderStateCreate(self, handle: ctypes.c_void_p, state: Any, stream: ctypes.c_void_p) -> int:
        assert handle.value in self.handles
        assert stream.value
        return self._made(state)

    nvjpegEncoderParamsCreate = nvjpegEncoderStateCreate

    def nvjpegDestroy(self, handle: ctypes.c_void_p) -> int:
        return self._gone(handle)

    nvjpegEncoderStateDestroy = nvjpegEncoderParamsDestroy = nvjpegDestroy

    def nvjpegEncoderParamsSetQuality(self, parameters: Any, quality: int, stream: Any) -> int:
        self.quality = quality
        return 0

    def nvjpegEncoderParamsSetSamplingFactors(self, parameters: Any, chroma: int, stream: Any) -> int:
        self.chroma = chroma
        return 0

    def nvjpegEncodeImage(
        self, handle: Any, state: Any, parameters: Any, image: Any, kind: int, width: int, height: int, stream: Any
    ) -> int:
        assert (kind, image._obj.pitch[0]) == (5, 3 * width)  # NVJPEG_INPUT_RGBI
        pixels = ctypes.string_at(image._obj.channel[0], 3 * width * height)
        picture = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
        self.jpeg = simplejpeg.encode_jpeg(picture, quality=self.quality, colorspace="RGB", colorsubsampling="420")
        return 0

    def nvjpegEncodeRetrieveBitstream(self, handle: Any, state: Any, place: Any, length: Any, stream: Any) -> int:
        if place is not None:
            assert length._obj.value >= len(self.jpeg)
            ctypes.memmove(place, self.jpeg, len(self.jpeg))
        length._obj.value = len(self.jpeg)
        return 0


def picture(width: int, height: int, seed: int = 0) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Smooth colours."""
    across, down = np.meshgrid(np.linspace(0, 200, width), np.linspace(0, 200, height))
    return np.stack([across, down, np.full_like(across, 10 * seed)], axis=2).astype(np.uint8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


@pytest.fixture
def library() -> FakeNvjpeg:
    return FakeNvjpeg()


def test_nvjpeg_makes_a_jpeg_of_each_picture(driver: FakeDriver, library: FakeNvjpeg) -> None:
    """Pictures of any size one after the other, larger and smaller: each is its own, 4:2:0, of that quality."""
    encoder = NvJpeg(Device.open(), quality=80, library=library)
    for seed, size in enumerate([(64, 48), (321, 241), (16, 16), (321, 241)]):
        original = picture(*size, seed=seed)
        read = simplejpeg.decode_jpeg(encoder.encode(original))
        assert read.shape == original.shape
        assert np.abs(read.astype(int) - original).mean() < 3
    assert (library.quality, library.chroma) == (80, 2)
    encoder.close()


def test_nvjpeg_takes_a_picture_with_gaps(driver: FakeDriver, library: FakeNvjpeg) -> None:
    """A part of a larger picture, whose lines do not follow each other in memory."""
    encoder = NvJpeg(Device.open(), quality=95, library=library)
    part = picture(100, 80)[::2, ::2]
    assert np.abs(simplejpeg.decode_jpeg(encoder.encode(part)).astype(int) - part).mean() < 3


def test_nvjpeg_gives_all_back(driver: FakeDriver, library: FakeNvjpeg) -> None:
    """Closed twice after use: no memory, stream or handle is left."""
    encoder = NvJpeg(Device.open(), quality=80, library=library)
    encoder.encode(picture(64, 48))
    encoder.encode(picture(128, 96))
    assert (len(driver.blocks), len(driver.pinned), len(library.handles)) == (1, 1, 3)
    encoder.close()
    encoder.close()
    assert driver.is_all_given_back
    assert library.handles == set()


STARTS = ["nvjpegCreateSimple", "nvjpegEncoderStateCreate", "nvjpegEncoderParamsCreate",
          "nvjpegEncoderParamsSetQuality", "nvjpegEncoderParamsSetSamplingFactors"]  # fmt: skip


@pytest.mark.parametrize("function", STARTS)
def test_nvjpeg_that_does_not_start_leaves_nothing(driver: FakeDriver, library: FakeNvjpeg, function: str) -> None:
    """If a step fails, the error has its name and nvJPEG's status, and all resources are released."""
    library.failing = function
    with pytest.raises(GpuFailed, match=f"{function}: nvJPEG answers EXECUTION_FAILED"):
        NvJpeg(Device.open(), quality=80, library=library)
    assert driver.is_all_given_back
    assert library.handles == set()


@pytest.mark.parametrize(
    "function", ["nvjpegEncodeImage", "nvjpegEncodeRetrieveBitstream", "cuMemAlloc", "cuMemcpyAsync"]
)
def test_nvjpeg_that_fails_says_so_and_can_be_closed(driver: FakeDriver, library: FakeNvjpeg, function: str) -> None:
    """A failure of a picture, of the library or of the card, is GpuFailed; closing gives all back."""
    encoder = NvJpeg(Device.open(), quality=80, library=library)
    if function.startswith("cu"):
        driver.fail(function, "CUDA_ERROR_OUT_OF_MEMORY")
    library.failing = function
    with pytest.raises(GpuFailed):
        encoder.encode(picture(64, 48))
    driver.fail(function, None)
    library.failing = ""
    assert encoder.encode(picture(64, 48)).startswith(b"\xff\xd8")
    encoder.close()
    assert driver.is_all_given_back
    assert library.handles == set()


def test_nvjpeg_without_the_library_says_how_to_get_it(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names what installs it."""
    monkeypatch.setattr(nvjpeg, "_candidates", lambda: iter(["/no/such/libnvjpeg.so.13"]))
    with pytest.raises(GpuUnavailable, match="libnvjpeg is not here: run make gpu"):
        NvJpeg(Device.open(), quality=80)
    assert driver.is_all_given_back


def test_nvjpeg_is_looked_for_at_pip_the_linker_and_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In that order, CUDA 13's before 12's."""
    package = ModuleType("nvidia")
    folders = [tmp_path / "cuda-13.0" / "targets" / "x86_64-linux" / "lib", tmp_path / "cuda-12.8" / "lib64"]
    for folder, version in zip(folders, (13, 12), strict=True):
        folder.mkdir(parents=True)
        (folder / f"libnvjpeg.so.{version}").touch()
    spec: Callable[[str], Any] = lambda name: type("Spec", (), {"submodule_search_locations": ["/pip/nvidia"]})  # noqa: E731
    monkeypatch.setitem(sys.modules, "nvidia", package)
    monkeypatch.setattr(nvjpeg, "find_spec", spec)
    monkeypatch.setattr(nvjpeg, "_TOOLKITS", tmp_path)
    assert list(nvjpeg._candidates()) == [
        "/pip/nvidia/cu13/lib/libnvjpeg.so.13",
        "/pip/nvidia/nvjpeg/lib/libnvjpeg.so.12",
        "libnvjpeg.so.13",
        "libnvjpeg.so.12",
        f"{folders[0]}/libnvjpeg.so.13",
        f"{folders[1]}/libnvjpeg.so.12",
    ]
