"""Memory of a card that is shared with an engine: one block, exported once, handed out in leases.

Leases are taken and given back by the engine's thread; rows are gathered by any one thread at a time.
"""

import math
import os
import secrets
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from deepstream_pipeline.gpu.device import Device
from deepstream_pipeline.types import DeviceRow

ALIGNMENT = 512
LINGER_S = 2.0  # after a call that was given up its engine may still begin to read

CallLater = Callable[[float, Callable[[], None]], object]


class DeviceLease:
    """Bytes of the slab that are somebody's until they are released. offset: in the slab."""

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
        """The first free piece of so many bytes; None where there is none now."""
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
