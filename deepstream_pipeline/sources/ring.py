"""The memory between a source's decode process and its parent: slots of one size in an anonymous file, mapped by both.

Pages that nobody touched cost nothing, so a slot is as large as the largest frame that is allowed. A slot holds the
network's row at its begin, and behind it the picture, where it travels. The child writes a free slot and hands it over;
the parent hands it back. Nobody looks at a slot that is not theirs.
"""

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
    """frames: slots. slot_bytes: of each, a multiple of ALIGNMENT."""

    frames: int
    slot_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.frames * self.slot_bytes


def ring_size(frames: int, row_bytes: int, image_bytes: int) -> RingSize:
    """With room for a row and a picture of so many bytes in each slot."""
    needed = image_offset(row_bytes) + image_bytes
    return RingSize(frames, -(-max(needed, 1) // ALIGNMENT) * ALIGNMENT)


def image_offset(row_bytes: int) -> int:
    """Where in a slot the picture lies, behind a row of so many bytes."""
    return -(-row_bytes // _IMAGE_ALIGNMENT) * _IMAGE_ALIGNMENT


def new_ring(size: RingSize, name: str) -> int:
    """The descriptor of new memory of that size, for ever: a child that cut it would end its parent by SIGBUS.
    Close-on-exec. Raises OSError."""
    descriptor = os.memfd_create(f"penstock-ring-{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size.size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Ring:
    """One process's view of the memory. It takes the descriptor over, also where it raises OSError. Arrays of it stay
    valid after `close`."""

    def __init__(self, descriptor: int, size: RingSize) -> None:
        self.size = size
        self._descriptor = descriptor
        try:
            self._bytes = np.frombuffer(mmap.mmap(descriptor, size.size_bytes), np.uint8)
        except BaseException:
            self.close()
            raise

    def array(self, slot: int, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> "npt.NDArray[np.generic]":
        """A view into a slot. Raises ValueError where it would reach beyond it, so that no child's word is trusted."""
        count = math.prod(shape) * np.dtype(dtype).itemsize
        if not 0 <= slot < self.size.frames or offset < 0 or count < 0 or offset + count > self.size.slot_bytes:
            raise ValueError(f"{count} bytes at {offset} of slot {slot} lie outside a ring of {self.size}")
        begin = slot * self.size.slot_bytes + offset
        view: npt.NDArray[np.generic] = self._bytes[begin : begin + count].view(dtype).reshape(shape)
        return view

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last array."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
