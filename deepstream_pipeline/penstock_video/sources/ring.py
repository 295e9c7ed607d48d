"""The frame ring that a decode process shares with its parent: its size, its memory, and views of its slots."""

import fcntl
import math
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ALIGNMENT = 4096
_IMAGE_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class RingSize:
    """frames: slots. slot_bytes: of each slot, a multiple of ALIGNMENT."""

    frames: int
    slot_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.frames * self.slot_bytes


def ring_size(frames: int, row_bytes: int, image_bytes: int) -> RingSize:
    """The size of a ring whose slots hold a row and a picture of these sizes."""
    needed = image_offset(row_bytes) + image_bytes
    return RingSize(frames, -(-max(needed, 1) // ALIGNMENT) * ALIGNMENT)


def image_offset(row_bytes: int) -> int:
    """Offset of the picture in a slot, after a row of this size."""
    return -(-row_bytes // _IMAGE_ALIGNMENT) * _IMAGE_ALIGNMENT


def new_ring(size: RingSize, name: str) -> int:
    """Descriptor of new memory, sealed since shrinking would cause SIGBUS here. Close-on-exec. Raises OSError."""
    descriptor = os.memfd_create(f"penstock-ring-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size.size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Ring:
    """One process's view of the memory. Owns the descriptor, also if it raises OSError. Arrays outlive `close`."""

    def __init__(self, descriptor: int, size: RingSize) -> None:
        self.size = size
        self._descriptor = descriptor
        try:
            self._bytes = np.frombuffer(mmap.mmap(descriptor, size.size_bytes), np.uint8)
        except BaseException:
            self.close()
            raise

    def array(self, slot: int, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> "npt.NDArray[np.generic]":
        """A view into a slot. Raises ValueError if it exceeds the slot, since a child's values are not trusted."""
        count = math.prod(shape) * np.dtype(dtype).itemsize
        if not 0 <= slot < self.size.frames or offset < 0 or count < 0 or offset + count > self.size.slot_bytes:
            raise ValueError(f"{count} bytes at {offset} of slot {slot} lie outside a ring of {self.size}")
        begin = slot * self.size.slot_bytes + offset
        view: npt.NDArray[np.generic] = self._bytes[begin : begin + count].view(dtype).reshape(shape)
        return view

    def close(self) -> None:
        """Closes the descriptor; the mapping is freed with the last array."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
