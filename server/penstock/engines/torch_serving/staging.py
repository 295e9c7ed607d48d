"""Page-locks the shared-memory regions of request tensors, because copies from pageable memory block.

Triton's Python backend has them in a growing file of /dev/shm; each growth is a new mapping, and old ones stay. The
tensors of a batch usually lie in it one after the other at equal distances, so that one copy gathers them.
"""

import bisect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = ("/dev/shm/", "/memfd:")  # Triton's, and the gateway's, which has no name in a folder
_OWN_MAPPINGS = Path("/proc/self/maps")


@dataclass(frozen=True)
class PitchedRows:
    """Blocks of width bytes in host memory, their begins pitch bytes apart."""

    address: int
    pitch: int
    width: int
    count: int


# (device address, rows, CUDA stream): copies them without gaps. False: the driver refused, nothing was copied.
CopyRows = Callable[[int, PitchedRows, int], bool]


def pitched_runs(addresses: Sequence[int], places: Sequence[int], width: int) -> list[PitchedRows]:
    """Copies for the blocks, in order: ascending neighbours of one region at one distance share a copy.

    places: number of each block's region.
    """
    runs: list[PitchedRows] = []
    begin = 0
    while begin < len(addresses):
        end, pitch = begin + 1, width
        while end < len(addresses) and places[end] == places[begin]:
            distance = addresses[end] - addresses[end - 1]
            if distance < width or (end > begin + 1 and distance != pitch):
                break
            end, pitch = end + 1, distance
        runs.append(PitchedRows(addresses[begin], pitch, width, end - begin))
        begin = end
    return runs


@dataclass(frozen=True, order=True)
class Mapping:
    """A mapped file. Its end is exclusive."""

    begin: int
    end: int
    path: str


def shared_mappings(lines: Iterable[str]) -> list[Mapping]:
    """The writable mappings of shared memory in the lines of /proc/PID/maps, by address."""
    found = []
    for line in lines:
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(SHARED_MEMORY) and words[1].startswith("rw"):
            begin, _, end = words[0].partition("-")
            found.append(Mapping(int(begin, 16), int(end, 16), words[5].strip()))
    return sorted(found)


class PinnedRegions:
    """Page-locks an address's region at its first use. lock, unlock: (address, size); failures are not retried.

    copy: to the GPU; by default nothing is gathered.
    """

    def __init__(
        self,
        lock: Callable[[int, int], bool],
        unlock: Callable[[int, int], None],
        read: Callable[[], Iterable[str]] = lambda: _OWN_MAPPINGS.read_text().splitlines(),
        *,
        copy: CopyRows = lambda *_: False,
        pause_s: float = 0.0,  # after an address outside of shared memory, mappings are not read for that time
    ) -> None:
        self._lock = lock
        self._unlock = unlock
        self._read = read
        self._copy = copy
        self._known: list[Mapping] = []
        self._locked: set[Mapping] = set()
        self._pause_s = pause_s
        self._read_again_s = 0.0

    def pin(self, address: int) -> bool:
        """Whether the address is in page-locked memory now; False outside of shared memory."""
        place = self._place(address)
        if place < 0 or address >= self._known[place].end:
            return self._lock_region(address)
        return self._known[place] in self._locked

    def gather(self, target: int, addresses: Sequence[int], width: int, stream: int) -> bool:
        """Whether the blocks were copied: all lie in page-locked regions. One copy for blocks at equal distances.

        target: the GPU's address. width: of each block, bytes. The copies are asynchronous, on the CUDA stream.
        """
        if not all(self.pin(address) for address in addresses):
            return False
        for run in pitched_runs(addresses, [self._place(address) for address in addresses], width):
            if not self._copy(target, run, stream):
                return False
            target += run.count * width
        return True

    def _place(self, address: int) -> int:
        return bisect.bisect_right(self._known, address, key=lambda mapping: mapping.begin) - 1

    def _lock_region(self, address: int) -> bool:
        now = time.monotonic()
        if now < self._read_again_s:
            return False
        mapping = next((one for one in shared_mappings(self._read()) if one.begin <= address < one.end), None)
        if mapping is None:
            self._read_again_s = now + self._pause_s
            return False
        self._forget(mapping)
        bisect.insort(self._known, mapping)
        if self._lock(mapping.begin, mapping.end - mapping.begin):
            self._locked.add(mapping)
        return mapping in self._locked

    def _forget(self, new: Mapping) -> None:
        """Removes mappings that overlap with the new one, and smaller mappings of its file: the same pages."""
        for old in list(self._known):
            if old.path == new.path or (old.begin < new.end and new.begin < old.end):
                self._known.remove(old)
                if old in self._locked:
                    self._locked.discard(old)
                    self._unlock(old.begin, old.end - old.begin)
