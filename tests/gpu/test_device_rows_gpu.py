"""On a real card: its memory, and rows, pictures and thumbnails against the CPU's way (the same suite as without one).

Stated tolerance: deepstream_pipeline/penstock_video/preprocess/device_rows.py.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock_video.errors import GpuFailed, GpuUnavailable
from penstock_video.gpu.device import Device, zeros_pinned
from penstock_video.preprocess.kernels import cubin_for
from tests.deepstream_pipeline.preprocess.device_pictures import NETWORK, made_row, noise
from tests.deepstream_pipeline.preprocess.device_row_suite import DeviceRowSuite

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def card() -> Device:
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings: make gpu")
    return Device.open()


@pytest.fixture
def device(card: Device) -> Iterator[Device]:
    card.bind()
    return card


class TestDeviceRowsOnTheCard(DeviceRowSuite):
    """The kernels as NVRTC compiles them."""


def test_copies_come_back_as_they_went(device: Device) -> None:
    """Pinned and plain memory, either direction, megabytes of it."""
    stream, block = device.new_stream(), device.allocate(5_000_001)
    sent = np.random.default_rng(1).integers(0, 256, block.size_bytes, np.uint8)
    pinned, pinning = zeros_pinned(device, sent.shape, np.uint8)
    plain = np.zeros_like(sent)
    device.copy(block.address, sent.ctypes.data, sent.nbytes, stream.handle)
    device.copy(pinned.ctypes.data, block.address, sent.nbytes, stream.handle)
    device.copy(plain.ctypes.data, block.address, sent.nbytes, stream.handle)
    stream.synchronize()
    for received in (pinned, plain):
        np.testing.assert_array_equal(received, sent)
    assert len(block.ipc_handle()) == 64
    for part in (pinning, block, stream):
        part.close()


def test_open_a_card_beyond_the_last_is_unavailable(device: Device) -> None:
    """The sentence says how many there are."""
    with pytest.raises(GpuUnavailable, match="there is no GPU 99"):
        Device.open(99)


def test_allocate_more_than_there_is_has_cudas_word(device: Device) -> None:
    """The card and its context stay usable."""
    with pytest.raises(GpuFailed, match="CUDA_ERROR_OUT_OF_MEMORY"):
        device.allocate(1 << 50)
    device.allocate(1).close()


def test_compiled_kernels_are_kept_for_the_next_process(device: Device, tmp_path: Path) -> None:
    """The second time the file is read instead of compiled, and is the same."""
    made = cubin_for(device.capability, tmp_path)
    assert cubin_for(device.capability, tmp_path) == made
    assert len(list(tmp_path.iterdir())) == 1


def test_threads_of_one_card_make_their_rows_at_once(device: Device) -> None:
    """Each bound, with its own stream and preparer, as the cameras of a decode process are."""
    wrong: list[int] = []

    def make(seed: int) -> None:
        device.bind()
        stored = noise(640, 360, seed)
        if not np.array_equal(made_row(device, stored, NETWORK), stored.row(NETWORK)):
            wrong.append(seed)

    threads = [threading.Thread(target=make, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert wrong == []
