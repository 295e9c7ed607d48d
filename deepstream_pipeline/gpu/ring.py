"""The memory of a card between a source's decode process and the engine: slots of one size, one behind the other.

The video program allocates it and exports it; the decode process opens it by its handle and writes rows there. Which
slot is whose is told as of the ring in host memory.
"""

import numpy as np
import numpy.typing as npt

from deepstream_pipeline.gpu.device import Device
from deepstream_pipeline.types import DeviceRow

SLOT_ALIGNMENT = 512  # as CUDA aligns what it allocates, so that copies and kernels take their widest steps


def slot_bytes(row_bytes: int) -> int:
    """From slot to slot, where a row has so many bytes; both processes reckon with it."""
    return -(-max(row_bytes, 1) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class DeviceRing:
    """The video program's side. handle: by which another process of this machine opens it (CUDA IPC)."""

    def __init__(self, device: Device, frames: int, row_bytes: int) -> None:
        """Raises GpuFailed where the card has no room."""
        self._frames = frames
        self._slot_bytes = slot_bytes(row_bytes)
        self._device = device
        device.bind()  # threads that come and go make rings
        self._block = device.allocate(frames * self._slot_bytes)
        self._is_open = True
        try:
            self.handle = self._block.ipc_handle()
        except BaseException:
            self._block.close()
            raise

    def __repr__(self) -> str:
        return f"<DeviceRing {self._frames} slots of {self._slot_bytes} B>"

    def row(self, slot: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceRow:
        """What lies in a slot. Raises ValueError where it would reach beyond it, so that no child's word is trusted."""
        row = DeviceRow(self._block.address + slot * self._slot_bytes, shape, np.dtype(dtype))
        is_inside = 0 <= slot < self._frames and min(shape, default=0) >= 0
        if not is_inside or row.nbytes > self._slot_bytes:
            raise ValueError(f"a row of {list(shape)} {row.dtype} in slot {slot} lies outside {self!r}")
        if not self._is_open:
            raise ValueError(f"{self!r} is closed")
        return row

    def close(self) -> None:
        """When nobody reads or writes it any more. A second call does nothing."""
        self._is_open = False
        self._device.bind()
        self._block.close()


class DeviceSlots:
    """The decode process's side."""

    def __init__(self, device: Device, handle: bytes, frames: int, row_bytes: int) -> None:
        """Raises GpuFailed where the memory cannot be opened: its owner is gone, or has another card."""
        self._frames = frames
        self._slot_bytes = slot_bytes(row_bytes)
        self._block = device.open_block(handle, frames * self._slot_bytes)

    def address(self, slot: int) -> int:
        """Where the slot begins, in this process. Raises ValueError for none of the ring."""
        if not 0 <= slot < self._frames:
            raise ValueError(f"there is no slot {slot} of {self._frames}")
        return self._block.address + slot * self._slot_bytes

    def close(self) -> None:
        """When the card has written what it was to write. A second call does nothing."""
        self._block.close()
