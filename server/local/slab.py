"""The slab: bounded memory handed out in leases, which an engine on this host reads without being sent the bytes."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from server.core.tensor import Place
from server.local.extents import Extents
from server.local.slab_memory import Lent, SlabMemory

LINGER_S = 2.0  # after a call that was given up its engine may still begin to read


@dataclass(frozen=True, slots=True)
class SlabStatistics:
    """leases, leased_bytes: held now, of this generation, without what is lent. reserved_bytes: had of the machine."""

    leases: int
    leased_bytes: int
    reserved_bytes: int


class _Generation:
    """One memory and what of it is taken."""

    def __init__(self, memory: SlabMemory, number: int) -> None:
        self.memory = memory
        self.number = number
        self.extents = Extents(memory.size_bytes, memory.begin)
        self.leases: dict[int, SlabLease] = {}
        self.lent: list[SlabLease] = []


class SlabLease:
    """See server.core.slab.Lease."""

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
    def place(self) -> Place:
        generation = self._generation
        return Place(generation.memory.name, generation.number, self._offset)

    @property
    def view(self) -> memoryview:
        return self._generation.memory.view[self._offset : self._offset + self._size_bytes]

    @property
    def descriptor(self) -> int:
        return self._generation.memory.descriptor

    @property
    def is_held(self) -> bool:
        """Whether somebody may still read or write there."""
        return self._holds > 0

    def hold(self) -> None:
        self._holds += 1

    def release(self) -> None:
        """Raises ValueError where it was released more often than held: its bytes may be another's."""
        if self._holds <= 0:
            raise ValueError(f"the lease of {self._size_bytes} bytes at {self._offset} was released once too often")
        self._holds -= 1
        if not self._holds:
            generation = self._generation
            if generation.leases.pop(self._offset, None) is None:
                generation.lent.remove(self)
            generation.extents.give_back(self._offset)

    def covers(self, offset: int) -> bool:
        """Whether the byte there is of this lease."""
        return self._offset <= offset < self._offset + self._size_bytes

    def holds(self, offset: int, size_bytes: int) -> bool:
        """Whether so many bytes from there on are all of this lease."""
        end = self._offset + self._size_bytes
        return self._offset <= offset < end and 0 <= size_bytes <= end - offset

    def release_later(self) -> None:
        self._call_later(LINGER_S, self.release)


class SharedSlab:
    """See server.core.slab.Slab. Without memory, as it begins, it has no room.

    call_later: the event loop's. New memory (`renew`) is a new generation; leases of the one before keep theirs.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_later = call_later
        self._current: _Generation | None = None
        self._number = 0

    def renew(self, memory: SlabMemory, number: int = 0) -> None:
        """Leases are of this memory from now on. number: its generation where it is lent, 0 for one more."""
        self._number = number or self._number + 1
        self._current = _Generation(memory, self._number)

    def renounce(self) -> None:
        """There is no room from now on; what is leased stays its holder's."""
        self._current = None

    @property
    def generation(self) -> int:
        """Of the memory that there is; 0 for none."""
        return self._number if self._current is not None else 0

    def lend(self, size_bytes: int) -> tuple[Lent, SlabLease] | None:
        """Room for another process to lease out itself, and the hold on it; None where there is none now.

        The other process holds what it leases until whatever reads it has answered, and LINGER_S longer where that was
        given up. What is read here of a place there holds the whole.
        """
        current = self._current
        offset = current.extents.take_last(size_bytes) if current is not None else None
        if current is None or offset is None:
            return None
        lease = SlabLease(current, offset, size_bytes, self._call_later)
        current.lent.append(lease)
        memory = current.memory
        return Lent(os.getpid(), memory.descriptor, memory.name, current.number, offset, size_bytes), lease

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

    def lease_of(self, place: Place) -> SlabLease | None:
        current = self._current
        if current is None or place.generation != current.number or place.region != current.memory.name:
            return None
        lease = current.leases.get(place.offset)
        if lease is None and current.lent:
            return next((lent for lent in current.lent if lent.covers(place.offset)), None)
        return lease

    def window(self, place: Place, size_bytes: int) -> memoryview:
        """Raises ValueError for a place of an earlier generation: who holds it has views of its own."""
        current = self._current
        if current is None or place.generation != current.number:
            raise ValueError(f"{place} is not of the slab's memory, which is of generation {self._number}")
        return current.memory.view[place.offset : place.offset + size_bytes]

    def statistics(self) -> SlabStatistics:
        """For metrics."""
        current = self._current
        if current is None:
            return SlabStatistics(0, 0, 0)
        extents = current.extents
        return SlabStatistics(len(extents), extents.taken_bytes, current.memory.reserved_bytes)
