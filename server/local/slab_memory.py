"""The slab's memory: a file that has no name, but for the moment in which an engine opens it."""

import contextlib
import errno
import fcntl
import mmap
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
TRIES = 8  # of a name: another process that starts may clear the file away before it is locked
STEP_BYTES = 4 << 20  # pages are had in steps; one takes about a millisecond


@dataclass(frozen=True, slots=True)
class Lent:
    """A part of one process's slab that another one uses. descriptor: the lending process's own."""

    process_id: int
    descriptor: int
    region: str
    generation: int
    offset: int
    size_bytes: int


class SlabMemory:
    """size_bytes of a file, mapped. Pages are had by `reserve` only: touching others of a full /dev/shm is deadly.

    name: the file's in /dev/shm while it has one, and the region's at an engine; unlike any other. descriptor: the
    memory's from now on. begin: what lies before it is another's.
    """

    def __init__(self, name: str, descriptor: int, size_bytes: int, begin: int = 0) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.begin = begin
        self.reserved_bytes = begin
        self.descriptor = descriptor
        self.view = memoryview(mmap.mmap(descriptor, size_bytes))

    def __del__(self) -> None:
        """Leases hold it; the last one closes the file. The mapping lasts as long as views of it do."""
        os.close(self.descriptor)

    def reserve(self, end: int) -> bool:
        """Whether the bytes up to there may be touched from now on. Half of /dev/shm stays for the engine's models."""
        if end <= self.reserved_bytes:
            return True
        wanted = min(-(-end // STEP_BYTES) * STEP_BYTES, self.size_bytes)
        room = os.fstatvfs(self.descriptor)
        free_blocks = room.f_bavail - (wanted - self.reserved_bytes) // max(room.f_frsize, 1)
        if room.f_blocks and free_blocks < room.f_blocks // 2:
            return False
        try:
            os.posix_fallocate(self.descriptor, self.reserved_bytes, wanted - self.reserved_bytes)
        except OSError:
            return False
        self.reserved_bytes = wanted
        return True


def nameless_memory(size_bytes: int) -> SlabMemory:
    """Of this process and whom it hands the descriptor. Raises OSError."""
    name = _new_name()
    return _sized(name, os.memfd_create(name, os.MFD_CLOEXEC), size_bytes)


def lent_memory(lent: Lent) -> SlabMemory:
    """What another process of this user lent, mapped here. Raises OSError where that process is gone."""
    descriptor = os.open(f"/proc/{lent.process_id}/fd/{lent.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    return SlabMemory(lent.region, descriptor, lent.offset + lent.size_bytes, lent.offset)


def _sized(name: str, descriptor: int, size_bytes: int) -> SlabMemory:
    os.ftruncate(descriptor, size_bytes)
    return SlabMemory(name, descriptor, size_bytes)


@contextlib.contextmanager
def named_memory(size_bytes: int, folder: Path = SHARED_MEMORY) -> Iterator[SlabMemory]:
    """Has its name within the block only. Raises OSError.

    Locked meanwhile: a file of that form without a lock was left by a process that was killed within its block, and
    is removed.
    """
    _clear_away(folder)
    name, descriptor = _named_file(folder)
    try:
        yield _sized(name, descriptor, size_bytes)
    finally:
        (folder / name).unlink(missing_ok=True)


def _named_file(folder: Path) -> tuple[str, int]:
    """A new file, locked. One that another process cleared away before it was locked is made again."""
    for _ in range(TRIES):
        name, has_name = _new_name(), False
        path = folder / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            has_name = os.fstat(descriptor).st_nlink > 0
        finally:
            if not has_name:
                path.unlink(missing_ok=True)
                os.close(descriptor)
        if has_name:
            return name, descriptor
    raise OSError(errno.EBUSY, f"{TRIES} new files in {folder} were removed as they were made")


def _new_name() -> str:
    return f"penstock_{uuid.uuid4().hex[:12]}_slab"


def _clear_away(folder: Path) -> None:
    for path in folder.glob("penstock_*_slab"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
