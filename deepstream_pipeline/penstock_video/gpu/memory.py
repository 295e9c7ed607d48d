"""GPU memory shared between processes: the ring of a source's rows, and leases of the block shared with the engine."""

import math
import os
import secrets
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from penstock_video.gpu.device import Device
from penstock_video.types import DeviceRow

SLOT_ALIGNMENT = 512  # as CUDA aligns what it allocates, so that copies and kernels take their widest steps


def slot_bytes(row_bytes: int) -> int:
    """From slot to slot, where a row has so many bytes; both processes reckon with it."""
    return -(-max(row_bytes, 1) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class CudaRing:
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
        """Call it when the memory is no longer used. A second call does nothing."""
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


ALIGNMENT = 512
LINGER_S = 2.0  # after a call that was given up its engine may still begin to read

CallLater = Callable[[float, Callable[[], None]], object]


class DeviceLease:
    """Bytes of the slab, in use until they are released. offset: in the slab."""

    __slots__ = ("_is_held", "_slab", "offset", "size_bytes")

    def __init__(self, slab: "DeviceSlab", offset: int, size_bytes: int) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self._slab = slab
        self._is_held = True

    def __repr__(self) -> str:
        return f"<DeviceLease {self.size_bytes} B at {self.offset} of {self._slab.name}>"

    @property
    def address(self) -> int:
        """In this process."""
        return self._slab.address + self.offset

    def release(self) -> None:
        """The bytes are another's. Raises ValueError where they are already."""
        if not self._is_held:
            raise ValueError(f"{self!r} was released before")
        self._is_held = False
        self._slab.take_back(self)

    def release_later(self) -> None:
        """The same a moment later: for a call that was given up, whose engine may read the bytes still."""
        self._slab.call_later(LINGER_S, self.release)


class DeviceSlab:
    """name: by which the engine knows it, of this program's run alone. handle: by which it opens it (CUDA IPC)."""

    def __init__(self, device: Device, size_bytes: int, call_later: CallLater) -> None:
        """call_later: the event loop's. Raises GpuFailed where the card has no room."""
        self.name = f"video_{os.getpid()}_{secrets.token_hex(6)}"
        self.size_bytes = size_bytes
        self.device_index = device.index
        self.call_later = call_later
        self._device = device
        self._taken: list[DeviceLease] = []  # in the order of their offsets: a few, of the batches at the engine
        device.bind()
        self._block = device.allocate(size_bytes)
        try:
            self.handle = self._block.ipc_handle()
            self._stream = device.new_stream()
        except BaseException:
            self._block.close()
            raise
        self.address = self._block.address

    def __len__(self) -> int:
        """Leases now."""
        return len(self._taken)

    def lease(self, size_bytes: int) -> DeviceLease | None:
        """The first free piece of size_bytes; None if there is none now."""
        wanted = -(-max(size_bytes, 1) // ALIGNMENT) * ALIGNMENT
        begin = 0
        for index, taken in enumerate(self._taken):
            if taken.offset - begin >= wanted:
                return self._new_lease(index, begin, wanted)
            begin = taken.offset + taken.size_bytes
        return self._new_lease(len(self._taken), begin, wanted) if self.size_bytes - begin >= wanted else None

    def gather(self, rows: Sequence[DeviceRow], lease: DeviceLease) -> None:
        """Copies the rows, one behind the other, to the lease's begin; returns when they are there.

        Raises GpuFailed, and ValueError where they have no room.
        """
        device, to, stream = self._device, lease.address, self._stream
        handle, copy = stream.handle, device.copy_within
        if sum(row.nbytes for row in rows) > lease.size_bytes:
            raise ValueError(f"{len(rows)} rows of {rows[0].nbytes} B do not fit into {lease!r}")
        device.bind()
        for row in rows:
            size_bytes = math.prod(row.shape) * row.dtype.itemsize
            copy(to, row.address, size_bytes, handle)
            to += size_bytes
        stream.synchronize()

    def write(self, array: npt.NDArray[np.generic], lease: DeviceLease) -> None:
        """The same with an array of this machine's memory, in C order."""
        if array.nbytes > lease.size_bytes or not array.flags.c_contiguous:
            raise ValueError(f"{array.nbytes} bytes of {list(array.shape)} do not fit into {lease!r}")
        self._device.bind()
        self._device.copy(lease.address, array.ctypes.data, array.nbytes, self._stream.handle)
        self._stream.synchronize()

    def close(self) -> None:
        """When the engine reads it no more. Waits for the card; a second call does nothing."""
        self._device.bind()
        self._stream.close()
        self._block.close()

    def take_back(self, lease: DeviceLease) -> None:
        """By the lease alone."""
        self._taken.remove(lease)

    def _new_lease(self, index: int, offset: int, size_bytes: int) -> DeviceLease:
        lease = DeviceLease(self, offset, size_bytes)
        self._taken.insert(index, lease)
        return lease
