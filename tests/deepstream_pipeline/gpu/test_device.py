"""The card through its driver's API: tried with a stand-in for NVIDIA's package; tests/gpu tries a real one."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock_video.errors import GpuFailed, GpuUnavailable
from penstock_video.gpu.device import Device, zeros_pinned
from tests.deepstream_pipeline.gpu.fake_driver import FakeDriver, install


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def test_open_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without `make gpu` gets that message, in one sentence."""
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(GpuUnavailable, match="cuda-bindings is not installed: run make gpu"):
        Device.open()


def test_open_without_the_driver_library_says_so(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-bindings raises a RuntimeError where there is no libcuda.so.1."""

    def not_found(flags: int) -> None:
        raise RuntimeError("can only be found via system search")

    monkeypatch.setattr(driver, "cuInit", not_found)
    with pytest.raises(GpuUnavailable, match=r"libcuda\.so\.1 is not here: install the driver"):
        Device.open()


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        ("cuInit", "CUDA_ERROR_NO_DEVICE", "CUDA shows no GPU here"),
        ("cuInit", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("cuDeviceGetCount", "CUDA_ERROR_INVALID_VALUE", "does not count its GPUs: CUDA_ERROR_INVALID_VALUE"),
        ("cuDeviceGet", "CUDA_ERROR_INVALID_VALUE", "GPU 0 cannot be used: CUDA_ERROR_INVALID_VALUE"),
        ("cuDeviceGetPCIBusId", "CUDA_ERROR_INVALID_VALUE", "could not ask the GPU's place on the bus"),
        ("cuDevicePrimaryCtxRetain", "CUDA_ERROR_OUT_OF_MEMORY", "could not make a context on the GPU"),
    ],
)
def test_open_a_driver_that_refuses_is_unavailable(driver: FakeDriver, function: str, error: str, said: str) -> None:
    """Whatever step fails, the sentence has CUDA's name for it or what is missing."""
    driver.fail(function, error)
    with pytest.raises(GpuUnavailable, match=said):
        Device.open()


@pytest.mark.parametrize("said", [{}, {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}])
def test_context_takes_few_of_a_cards_channels(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    """One for kernels and one for copies, but for what the environment says; that is afterwards as it was before."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    before, seen, init = dict(os.environ), [], driver.cuInit

    def look(flags: int) -> tuple[Any, ...]:
        seen.append({name: value for name, value in os.environ.items() if name.startswith("CUDA_DEVICE_MAX_")})
        return init(flags)

    monkeypatch.setattr(driver, "cuInit", look)
    Device.open()
    assert seen == [{"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"} | said]
    assert dict(os.environ) == before


@pytest.mark.parametrize("index", [1, 7, -1])
def test_open_a_card_that_is_not_there_says_how_many_are(driver: FakeDriver, index: int) -> None:
    """The index is wrong, not the machine: the sentence says where it is set."""
    with pytest.raises(
        GpuUnavailable, match=f"there is no GPU {index}: CUDA shows 1 GPU here, from 0; set gpu: device"
    ):
        Device.open(index)


def test_open_where_the_context_has_other_flags_goes_on(driver: FakeDriver) -> None:
    """Another library of the process may have made the primary context: it is shared as it is."""
    driver.fail("cuDevicePrimaryCtxSetFlags", "CUDA_ERROR_INVALID_VALUE")
    device = Device.open()
    assert (device.name, device.capability, device.context) == ("A card of the tests", (9, 0), 0xC0DE)


def test_card_is_known_by_its_place_on_the_bus(driver: FakeDriver) -> None:
    """Number 0 of two programs may be two cards; what tells them apart may be a part of a file's name."""
    assert Device.open().bus_id == "0000-1b-00.0"
    driver.first_bus = 0xAF
    assert Device.open().bus_id == "0000-af-00.0"


def test_block_holds_what_is_copied_to_it(driver: FakeDriver) -> None:
    """Bytes go to the card and come back, over a handle as another process would open it, and all is given back."""
    device = Device.open()
    stream, block = device.new_stream(), device.allocate(1000)
    there = device.open_block(block.ipc_handle(), block.size_bytes)
    sent = np.random.default_rng(1).integers(0, 256, 1000, np.uint8)
    received, pinning = zeros_pinned(device, (10, 100), np.uint8)
    assert not received.any()
    device.copy(block.address, sent.ctypes.data, 1000, stream.handle)
    device.copy(received.ctypes.data, there.address, 1000, stream.handle)
    stream.synchronize()
    np.testing.assert_array_equal(received.ravel(), sent)
    for part in (pinning, there, block, stream):
        part.close()
        part.close()
    assert driver.is_all_given_back


def test_allocate_takes_whole_pieces_of_two_mebibytes(driver: FakeDriver) -> None:
    """A smaller block would share its piece, and its handle would show others' memory to another process."""
    block = Device.open().allocate(5)
    assert block.size_bytes == 5
    assert driver.blocks[block.address].nbytes - 512 == 2 << 20


@pytest.mark.parametrize(
    ("function", "call", "said"),
    [
        ("cuMemAlloc", lambda device: device.allocate(70), "CUDA_ERROR_OUT_OF_MEMORY: could not allocate 70 B"),
        ("cuMemcpyAsync", lambda device: device.copy(1, 2, 9, 0), "CUDA_ERROR_OUT_OF_MEMORY: could not copy 9 B"),
        ("cuStreamQuery", lambda device: device.wait(0), "CUDA_ERROR_OUT_OF_MEMORY: could not wait for the GPU"),
        ("cuCtxSetCurrent", lambda device: device.bind(), "CUDA_ERROR_OUT_OF_MEMORY: could not bind a thread"),
        ("cuMemHostRegister", lambda device: device.pin(np.zeros(8)), "CUDA_ERROR_OUT_OF_MEMORY: could not pin 64 B"),
    ],
)
def test_call_that_fails_says_what_was_done_and_cudas_word(
    driver: FakeDriver, function: str, call: Callable[[Device], object], said: str
) -> None:
    """A driver's error is ours in one place."""
    device = Device.open()
    driver.fail(function, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(GpuFailed, match=said):
        call(device)


def test_wait_sleeps_until_the_card_is_done(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks soon, then seldomer: threads that wait for a card that is stuck look twenty times a second at last."""
    device, slept, looks = Device.open(), list[float](), 200
    not_ready, ready = (driver.CUresult.CUDA_ERROR_NOT_READY,), (driver.CUresult.CUDA_SUCCESS,)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(driver, "cuStreamQuery", lambda stream: not_ready if len(slept) < looks else ready)
    device.wait(0)
    assert slept == sorted(slept)
    assert (len(slept), slept[:3], slept[-1]) == (looks, [5e-5, 2.5e-4, 2.5e-4], 0.05)
    assert all(slept[place] <= max(2.5e-4, sum(slept[:place]) / 2) for place in range(1, looks)), "late by a half"


def test_open_block_of_a_handle_that_is_none_fails() -> None:
    """A handle of another length, or of a process that is gone."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        device = Device.open()
        with pytest.raises(GpuFailed, match="has 64 bytes, not 3"):
            device.open_block(b"abc", 10)
        with pytest.raises(GpuFailed, match="could not open another process's memory"):
            device.open_block(bytes(64), 10)
