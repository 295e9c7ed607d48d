"""Shared memory that the engine reads without a copy. It has a file name only while an engine opens it."""

import contextlib
import errno
import fcntl
import mmap
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.engines.torch_serving.slab_pictures import PublishedSlab, publish_slabs, slab_reference
from penstock.gateway.workers.slab_allocator import Extents
from penstock.protocol.inference import SlabAddress

SHARED_MEMORY = Path("/dev/shm")
TRIES = 8  # another starting process may remove the file before it is locked
STEP_BYTES = 4 << 20  # pages are reserved in steps of about a millisecond


@dataclass(frozen=True, slots=True)
class SlabPart:
    """A part of one process's slab that another one uses. descriptor: in the owner's process. token: for references."""

    process_id: int
    descriptor: int
    region: str
    generation: int
    offset: int
    size_bytes: int
    token: bytes = b""


class SlabMemory:
    """size_bytes of a mapped file. Access only `reserve`d bytes: others in a full /dev/shm raise SIGBUS.

    name: unique. descriptor: owned by this object. begin: bytes before it belong to another process.
    """

    def __init__(self, name: str, descriptor: int, size_bytes: int, begin: int = 0) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.begin = begin
        self.reserved_bytes = begin
        self.descriptor = descriptor
        self.view = memoryview(mmap.mmap(descriptor, size_bytes))

    def __del__(self) -> None:
        """Closes the file after the last lease. The mapping lasts as long as its views."""
        os.close(self.descriptor)

    def reserve(self, end: int) -> bool:
        """Whether the bytes up to `end` may be accessed. Leaves half of /dev/shm for the engine's models."""
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


def anonymous_memory(size_bytes: int) -> SlabMemory:
    """Memory without a file name. Raises OSError."""
    name = _new_name()
    return _sized_memory(name, os.memfd_create(name, os.MFD_CLOEXEC), size_bytes)


def map_slab_part(lent: SlabPart) -> SlabMemory:
    """Maps a part that another process of this user granted. Raises OSError if that process is gone."""
    descriptor = os.open(f"/proc/{lent.process_id}/fd/{lent.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    return SlabMemory(lent.region, descriptor, lent.offset + lent.size_bytes, lent.offset)


def _sized_memory(name: str, descriptor: int, size_bytes: int) -> SlabMemory:
    os.ftruncate(descriptor, size_bytes)
    return SlabMemory(name, descriptor, size_bytes)


@contextlib.contextmanager
def named_memory(size_bytes: int, folder: Path = SHARED_MEMORY) -> Iterator[SlabMemory]:
    """A locked file in /dev/shm, removed after the block. Also removes files of killed processes. Raises OSError."""
    _remove_stale_files(folder)
    name, descriptor = _named_file(folder)
    try:
        yield _sized_memory(name, descriptor, size_bytes)
    finally:
        (folder / name).unlink(missing_ok=True)


def _named_file(folder: Path) -> tuple[str, int]:
    """A new file, locked. Retries if another process removed it before it was locked."""
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


def _remove_stale_files(folder: Path) -> None:
    for path in folder.glob("penstock_*_slab"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


FORMER_S = 5.0
LINGER_S = 2.0  # after a cancelled call the engine may still begin to read


@dataclass(frozen=True, slots=True)
class SlabStatistics:
    """leases, leased_bytes: of this generation, without granted parts. reserved_bytes: of the machine's memory."""

    leases: int
    leased_bytes: int
    reserved_bytes: int


class _Generation:
    def __init__(self, memory: SlabMemory, number: int) -> None:
        self.memory = memory
        self.number = number
        self.extents = Extents(memory.size_bytes, memory.begin)
        self.leases: dict[int, SlabLease] = {}
        self.lent: list[SlabLease] = []


class SlabLease:
    """See penstock.protocol.shared_memory.Lease."""

    __slots__ = ("_call_later", "_generation", "_holds", "_offset", "_size_bytes")

    def __init__(
        self,
        generation: _Generation,
        offset: int,
        size_bytes: int,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._generation = generation
        self._offset = offset
        self._size_bytes = size_bytes
        self._holds = 1
        self._call_later = call_later

    @property
    def place(self) -> SlabAddress:
        generation = self._generation
        return SlabAddress(generation.memory.name, generation.number, self._offset)

    @property
    def view(self) -> memoryview:
        return self._generation.memory.view[self._offset : self._offset + self._size_bytes]

    @property
    def descriptor(self) -> int:
        return self._generation.memory.descriptor

    @property
    def is_held(self) -> bool:
        """Whether it may still be read or written."""
        return self._holds > 0

    def hold(self) -> None:
        self._holds += 1

    def release(self) -> None:
        """Raises ValueError if it was released more often than held: the bytes may be another lease's."""
        if self._holds <= 0:
            raise ValueError(f"the lease of {self._size_bytes} bytes at {self._offset} was released once too often")
        self._holds -= 1
        if not self._holds:
            generation = self._generation
            if generation.leases.pop(self._offset, None) is None:
                generation.lent.remove(self)
            generation.extents.give_back(self._offset)

    def covers(self, offset: int) -> bool:
        return self._offset <= offset < self._offset + self._size_bytes

    def holds(self, offset: int, size_bytes: int) -> bool:
        end = self._offset + self._size_bytes
        return self._offset <= offset < end and 0 <= size_bytes <= end - offset

    def release_later(self) -> None:
        self._call_later(LINGER_S, self.release)


class SharedSlab:
    """See penstock.protocol.shared_memory.Slab. It has no room until `renew`; earlier leases then stay valid."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_later = call_later
        self._current: _Generation | None = None
        self._number = 0
        self._token = b""  # of references; empty while the memory is not published
        self._published: tuple[SlabMemory, PublishedSlab] | None = None

    def publish(self, file: Path) -> None:
        """Lets models' processes read references to this memory, from now on until `renew`. Raises OSError.

        The memory before it can be read for FORMER_S more: workers may not know of this one yet.
        """
        if self._current is None:
            return
        memory, former = self._current.memory, self._published
        published = PublishedSlab(memory.descriptor, memory.size_bytes)
        publish_slabs(file, [published] if former is None else [published, former[1]])
        self._published, self._token = (memory, published), published.token
        self._call_later(FORMER_S, partial(lambda _: None, former))

    def unpublish(self) -> None:
        """Makes no more references, because a model's process cannot read them."""
        self._token = b""

    def reference(self, place: SlabAddress, size_bytes: int) -> bytes | None:
        """What a model's process reads the bytes by; None if they are not published, or of an earlier generation."""
        current = self._current
        if current is None or not self._token or place.generation != current.number:
            return None
        return slab_reference(self._token, place.offset, size_bytes)

    def renew(self, memory: SlabMemory, number: int = 0, token: bytes = b"") -> None:
        """Leases from this memory from now on. number, token: as granted by another process; 0 for the next number."""
        self._number = number or self._number + 1
        self._current = _Generation(memory, self._number)
        self._token = token

    def renounce(self) -> None:
        """Leases nothing from now on; existing leases stay valid."""
        self._current = None

    @property
    def generation(self) -> int:
        """Generation of the current memory; 0 for none."""
        return self._number if self._current is not None else 0

    def grant_part(self, size_bytes: int) -> tuple[SlabPart, SlabLease] | None:
        """A part for another process, and the lease of it; None if there is no room.

        The other process holds its leases until their reader has answered, and LINGER_S longer after a cancelled call.
        `lease_of` an address in the part holds all of it.
        """
        current = self._current
        offset = current.extents.take_last(size_bytes) if current is not None else None
        if current is None or offset is None:
            return None
        lease = SlabLease(current, offset, size_bytes, self._call_later)
        current.lent.append(lease)
        memory = current.memory
        granted = memory.descriptor, memory.name, current.number, offset, size_bytes, self._token
        return SlabPart(os.getpid(), *granted), lease

    def lease(self, size_bytes: int) -> SlabLease | None:
        current = self._current
        if current is None:
            return None
        offset = current.extents.take(size_bytes)
        if offset is None:
            return None
        if not current.memory.reserve(offset + size_bytes):
            current.extents.give_back(offset)
            current.extents.cut_off(current.memory.reserved_bytes)
            offset = current.extents.take(size_bytes)
            if offset is None:
                return None
        lease = SlabLease(current, offset, size_bytes, self._call_later)
        current.leases[offset] = lease
        return lease

    def lease_of(self, place: SlabAddress) -> SlabLease | None:
        current = self._current
        if current is None or place.generation != current.number or place.region != current.memory.name:
            return None
        lease = current.leases.get(place.offset)
        if lease is None and current.lent:
            return next((lent for lent in current.lent if lent.covers(place.offset)), None)
        return lease

    def window(self, place: SlabAddress, size_bytes: int) -> memoryview:
        """Raises ValueError for an address of an earlier generation."""
        current = self._current
        if current is None or place.generation != current.number:
            raise ValueError(f"{place} is not of the slab's memory, which is of generation {self._number}")
        return current.memory.view[place.offset : place.offset + size_bytes]

    def statistics(self) -> SlabStatistics:
        current = self._current
        if current is None:
            return SlabStatistics(0, 0, 0)
        extents = current.extents
        return SlabStatistics(len(extents), extents.taken_bytes, current.memory.reserved_bytes)
