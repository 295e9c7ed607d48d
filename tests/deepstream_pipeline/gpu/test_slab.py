"""Memory of the card that an engine reads, in leases: a stand-in for NVIDIA's driver, no card."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from penstock_video.errors import GpuFailed
from penstock_video.gpu.device import Device
from penstock_video.gpu.memory import ALIGNMENT, LINGER_S, DeviceLease, DeviceSlab
from penstock_video.types import DeviceRow
from tests.deepstream_pipeline.gpu.fake_driver import FakeDriver, install

SIZE = 16 * ALIGNMENT


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


class Rig:
    """A slab, and what it asked to be called later."""

    def __init__(self, size_bytes: int = SIZE) -> None:
        self.device = Device.open()
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.slab = DeviceSlab(self.device, size_bytes, lambda delay_s, then: self.later.append((delay_s, then)))

    def lease(self, size_bytes: int) -> DeviceLease:
        lease = self.slab.lease(size_bytes)
        assert lease is not None
        return lease


def test_leases_lie_apart_and_what_is_given_back_is_leased_again(driver: FakeDriver) -> None:
    """First fit: a hole is filled before what lies behind it, and never by what is larger."""
    rig = Rig()
    first, second, third = (rig.lease(size) for size in (100, 3 * ALIGNMENT, 513))
    assert [lease.offset for lease in (first, second, third)] == [0, ALIGNMENT, 4 * ALIGNMENT]
    assert second.address == rig.slab.address + ALIGNMENT
    second.release()
    assert [rig.lease(size).offset for size in (4 * ALIGNMENT, 2 * ALIGNMENT, ALIGNMENT)] == [
        6 * ALIGNMENT,
        ALIGNMENT,
        3 * ALIGNMENT,
    ]
    assert len(rig.slab) == 5


def test_slab_that_is_full_leases_nothing_until_something_is_given_back(driver: FakeDriver) -> None:
    """It is bounded, and says so at once."""
    rig = Rig()
    assert rig.slab.lease(SIZE + 1) is None
    whole = rig.lease(SIZE)
    assert rig.slab.lease(1) is None
    whole.release()
    assert rig.lease(SIZE).offset == 0


def test_lease_is_given_back_once(driver: FakeDriver) -> None:
    """A second time its bytes may be another's."""
    lease = Rig().lease(1)
    lease.release()
    with pytest.raises(ValueError, match="released before"):
        lease.release()


def test_lease_of_a_call_that_was_given_up_is_kept_a_moment(driver: FakeDriver) -> None:
    """Its engine may read it still."""
    rig = Rig()
    rig.lease(SIZE).release_later()
    assert rig.slab.lease(1) is None
    ((delay_s, then),) = rig.later
    then()
    assert (delay_s, rig.lease(SIZE).offset) == (LINGER_S, 0)


def test_rows_are_gathered_one_behind_the_other_with_one_wait(driver: FakeDriver) -> None:
    """In the order given, from wherever they lie; the card is waited for once."""
    rig = Rig()
    source = rig.device.allocate(10 * 4096)
    pixels = np.random.default_rng(3).random((10, 3, 4, 4), np.float32)
    rows = [DeviceRow(source.address + 4096 * index, (3, 4, 4), np.dtype(np.float32)) for index in range(10)]
    for row, value in zip(rows, pixels, strict=True):
        ctypes.memmove(row.address, value.ctypes.data, value.nbytes)
    rig.lease(1)
    lease = rig.lease(pixels.nbytes)
    driver.calls.clear()
    rig.slab.gather(rows[::-1], lease)
    found = np.frombuffer(ctypes.string_at(lease.address, pixels.nbytes), np.float32).reshape(pixels.shape)
    assert np.array_equal(found, pixels[::-1])
    assert driver.calls == ["cuCtxSetCurrent", *["cuMemcpyDtoDAsync"] * 10, "cuStreamQuery"]


def test_array_of_this_machine_is_written_to_a_lease(driver: FakeDriver) -> None:
    """For the trial's row."""
    rig = Rig()
    lease, wanted = rig.lease(48), np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    rig.slab.write(wanted, lease)
    assert np.array_equal(np.frombuffer(ctypes.string_at(lease.address, 48), np.float32), wanted.ravel())


def test_what_has_no_room_in_a_lease_is_refused_and_nothing_is_written(driver: FakeDriver) -> None:
    """It would be written over another call's rows."""
    rig = Rig()
    lease = rig.lease(ALIGNMENT)
    row = DeviceRow(rig.slab.address, (ALIGNMENT // 2 + 1,), np.dtype(np.uint8))
    driver.calls.clear()
    with pytest.raises(ValueError, match="2 rows of 257 B do not fit"):
        rig.slab.gather([row, row], lease)
    with pytest.raises(ValueError, match="513 bytes"):
        rig.slab.write(np.zeros(513, np.uint8), lease)
    with pytest.raises(ValueError, match="do not fit"):
        rig.slab.write(np.zeros((10, 10), np.uint8).T[:, :5], lease)
    assert driver.calls == []


def test_each_slab_has_a_name_of_its_own(driver: FakeDriver) -> None:
    """Of this run of the program: what a former one left in the engine is not taken for it."""
    names = {Rig().slab.name for _ in range(8)}
    assert len(names) == 8
    assert all(name.startswith("video_") and len(name) < 64 for name in names)


@pytest.mark.parametrize("step", ["cuMemAlloc", "cuIpcGetMemHandle", "cuStreamCreate"])
def test_slab_that_the_card_refuses_keeps_nothing(driver: FakeDriver, step: str) -> None:
    """And says what CUDA says."""
    driver.fail(step, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(GpuFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        Rig()
    assert driver.is_all_given_back


def test_row_of_memory_that_was_given_back_is_refused_and_not_read(driver: FakeDriver) -> None:
    """Its ring went meanwhile: that call fails, and the program lives."""
    rig = Rig()
    block = rig.device.allocate(4096)
    block.close()
    with pytest.raises(GpuFailed, match="CUDA_ERROR_INVALID_VALUE"):
        rig.slab.gather([DeviceRow(block.address, (16,), np.dtype(np.uint8))], rig.lease(16))


@pytest.mark.parametrize("step", ["cuMemcpyDtoDAsync", "cuStreamQuery"])
def test_card_that_fails_to_copy_is_reported(driver: FakeDriver, step: str) -> None:
    """The rows are not asked for then."""
    rig = Rig()
    driver.fail(step, "CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(GpuFailed, match="CUDA_ERROR_LAUNCH_FAILED"):
        rig.slab.gather([DeviceRow(rig.slab.address, (4,), np.dtype(np.uint8))], rig.lease(4))


def test_closed_slab_gives_all_back_and_closes_once(driver: FakeDriver) -> None:
    """Memory and stream."""
    rig = Rig()
    rig.slab.close()
    rig.slab.close()
    assert driver.is_all_given_back
