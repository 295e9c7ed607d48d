"""POSIX shared memory through descriptors: with a mapping, truncation by the owner would cause SIGBUS."""

import os
import stat
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 1 << 20  # initial size and growth step of a region of Triton's Python backend


class OpenedSegment:
    """One open segment. Close it after use."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def size_bytes(self) -> int:
        """Its current size."""
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int, size_bytes: int) -> bytearray:
        """The bytes from offset on; fewer if the segment is shorter."""
        found = bytearray(size_bytes)
        view = memoryview(found)
        count = 0
        while count < size_bytes:
            piece = os.preadv(self._descriptor, [view[count:]], offset + count)
            if not piece:
                break
            count += piece
        view.release()
        del found[count:]
        return found

    def write(self, offset: int, content: memoryview) -> None:
        """Writes all bytes. Raises OSError if the segment is too short."""
        written = 0
        while written < content.nbytes:
            written += os.pwrite(self._descriptor, content[written:], offset + written)

    def close(self) -> None:
        os.close(self._descriptor)


def open_segment(name: str) -> OpenedSegment:
    """Opens a file in /dev/shm. Raises OSError, also for links and special files."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(SHARED_MEMORY / name, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{name} is no shared memory segment")
    return OpenedSegment(descriptor)


def shared_memory_shortage() -> str:
    """Why /dev/shm is too full for Triton's Python backend; empty if it is not."""
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:  # no /dev/shm: Triton reports it
        return ""
    size_bytes, free_bytes = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    if not size_bytes or free_bytes >= MIN_FREE_BYTES:
        return ""
    return (
        f"the machine's shared memory is nearly full: {free_bytes >> 10} KiB of {size_bytes >> 20} MiB are free, and "
        f"{MIN_FREE_BYTES >> 10} KiB are needed; free some, or make /dev/shm larger"
    )
