"""The ring on the card, between a decode process and the engine: a stand-in for NVIDIA's driver, no card."""

import ctypes

import numpy as np
import numpy.typing as npt
import pytest

from penstock_video.errors import GpuFailed
from penstock_video.gpu.device import Device
from penstock_video.gpu.memory import SLOT_ALIGNMENT, CudaRing, DeviceSlots, slot_bytes
from penstock_video.types import DeviceRow
from tests.deepstream_pipeline.gpu.fake_driver import FakeDriver, install

SHAPE = (3, 20, 20)
ROW_BYTES = 3 * 20 * 20


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def content(row: DeviceRow) -> "npt.NDArray[np.uint8]":
    """What lies there, as the stand-in has it."""
    return np.frombuffer(ctypes.string_at(row.address, row.nbytes), row.dtype).reshape(row.shape)


def test_row_is_what_the_decode_process_wrote_into_the_slot(driver: FakeDriver) -> None:
    """Both sides reckon with the same slots, which begin where CUDA's widest steps do."""
    device = Device.open()
    ring = CudaRing(device, 4, ROW_BYTES)
    there = DeviceSlots(device, ring.handle, 4, ROW_BYTES)
    for slot in range(4):
        wanted = np.full(SHAPE, slot + 1, np.uint8)
        device.copy(there.address(slot), wanted.ctypes.data, wanted.nbytes, 0)
    rows = [ring.row(slot, SHAPE, np.uint8) for slot in range(4)]
    assert [content(row).max() for row in rows] == [content(row).min() for row in rows] == [1, 2, 3, 4]
    assert {(row.shape, row.dtype, row.address % SLOT_ALIGNMENT) for row in rows} == {(SHAPE, np.dtype(np.uint8), 0)}
    there.close()
    ring.close()
    assert driver.is_all_given_back


@pytest.mark.parametrize(("row_bytes", "expected"), [(1, 512), (512, 512), (513, 1024), (0, 512), (150_528, 150_528)])
def test_slots_are_rows_and_what_aligns_the_next(row_bytes: int, expected: int) -> None:
    """A network's row is mostly a multiple, and then nothing is wasted."""
    assert slot_bytes(row_bytes) == expected


@pytest.mark.parametrize(
    ("slot", "shape", "dtype"),
    [
        (-1, SHAPE, np.uint8),
        (4, SHAPE, np.uint8),
        (0, SHAPE, np.float32),
        (0, (3, 1 << 40, 1 << 40), np.uint8),
        (0, (3, -20, 20), np.uint8),
        (0, (3, -20, -20), np.uint8),
    ],
)
def test_row_outside_its_slot_is_refused(
    driver: FakeDriver, slot: int, shape: tuple[int, ...], dtype: npt.DTypeLike
) -> None:
    """Shapes are a child's word."""
    ring = CudaRing(Device.open(), 4, ROW_BYTES)
    with pytest.raises(ValueError, match="lies outside"):
        ring.row(slot, shape, dtype)


@pytest.mark.parametrize("slot", [-1, 4])
def test_slot_that_is_none_is_refused_to_the_decode_process(driver: FakeDriver, slot: int) -> None:
    """It would write over another's memory."""
    device = Device.open()
    ring = CudaRing(device, 4, ROW_BYTES)
    with pytest.raises(ValueError, match=f"no slot {slot} of 4"):
        DeviceSlots(device, ring.handle, 4, ROW_BYTES).address(slot)


def test_closed_ring_has_no_rows_and_closes_once(driver: FakeDriver) -> None:
    """Its memory is another's."""
    ring = CudaRing(Device.open(), 4, ROW_BYTES)
    ring.close()
    ring.close()
    with pytest.raises(ValueError, match="closed"):
        ring.row(0, SHAPE, np.uint8)
    assert driver.is_all_given_back


@pytest.mark.parametrize("step", ["cuMemAlloc", "cuIpcGetMemHandle"])
def test_ring_without_room_on_the_card_says_so_and_keeps_nothing(driver: FakeDriver, step: str) -> None:
    """CUDA's name for it is in the sentence."""
    driver.fail(step, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(GpuFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        CudaRing(Device.open(), 4, ROW_BYTES)
    assert driver.is_all_given_back
