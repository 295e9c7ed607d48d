"""Page-locks the shared-memory regions that request tensors are in, once each.

Triton's Python backend passes tensors in a file of /dev/shm that grows; each growth is a new mapping and the old one
stays. Copies from pageable memory go through a driver buffer and block the calling thread.
"""

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"
_OWN_MAPPINGS = Path("/proc/self/maps")


@dataclass(frozen=True, order=True)
class Mapping:
    """A mapped file: its first address, the one after its last, its path."""

    begin: int
    end: int
    path: str


def shared_mappings(lines: Iterable[str]) -> list[Mapping]:
    """The writable mappings of /dev/shm in the lines of /proc/PID/maps, by address."""
    found = []
    for line in lines:
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(SHARED_MEMORY) and words[1].startswith("rw"):
            begin, _, end = words[0].partition("-")
            found.append(Mapping(int(begin, 16), int(end, 16), words[5].strip()))
    return sorted(found)


class PinnedRegions:
    """Page-locks the region of an address when it is met first.

    lock, unlock: (address, size) of a whole mapping; lock says whether the driver took it. A region that it refused is
    not asked for again: copies from it are slower, and right.
    """

    def __init__(
        self,
        lock: Callable[[int, int], bool],
        unlock: Callable[[int, int], None],
        read: Callable[[], Iterable[str]] = lambda: _OWN_MAPPINGS.read_text().splitlines(),
    ) -> None:
        self._lock = lock
        self._unlock = unlock
        self._read = read
        self._known: list[Mapping] = []
        self._locked: set[Mapping] = set()

    def pin(self, address: int) -> bool:
        """Whether the memory at the address is page-locked now; False where it lies in no shared region."""
        place = bisect.bisect_right(self._known, address, key=lambda mapping: mapping.begin) - 1
        if place < 0 or address >= self._known[place].end:
            return self._lock_region(address)
        return self._known[place] in self._locked

    def _lock_region(self, address: int) -> bool:
        mapping = next((one for one in shared_mappings(self._read()) if one.begin <= address < one.end), None)
        if mapping is None:
            return False
        self._forget(mapping)
        bisect.insort(self._known, mapping)
        if self._lock(mapping.begin, mapping.end - mapping.begin):
            self._locked.add(mapping)
        return mapping in self._locked

    def _forget(self, new: Mapping) -> None:
        """What lies where the new one lies, and the smaller mappings of its file: the same pages twice."""
        for old in list(self._known):
            if old.path == new.path or (old.begin < new.end and new.begin < old.end):
                self._known.remove(old)
                if old in self._locked:
                    self._locked.discard(old)
                    self._unlock(old.begin, old.end - old.begin)
