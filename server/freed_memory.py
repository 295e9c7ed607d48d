"""Returns freed memory, which malloc keeps, to the system.

malloc gives back what lies at the end of its heaps alone: after 404 hostile pictures of up to 30 MB the gateway kept
200 MB that nothing used.
"""

import asyncio
import ctypes
import gc
import mmap
from collections.abc import Callable
from pathlib import Path

CHECK_EVERY_S = 10.0
GROWTH_BYTES = 24 << 20  # for less, the page faults cost more than the memory is worth
MAX_PAUSES = 15
_STATM = Path("/proc/self/statm")


def private_bytes() -> int:
    """Resident memory of this process that it shares with no other: mainly its heaps."""
    _, resident, shared, *_ = _STATM.read_bytes().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def give_back() -> None:
    """Runs the garbage collector, then returns every free page of every heap to the system (glibc only)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """Calls `trim` while memory is GROWTH_BYTES above its lowest: again and again, since what is in use is freed later.

    Calls that give little back become rare, until memory has grown again.
    """

    def __init__(self, measure: Callable[[], int] = private_bytes, trim: Callable[[], None] = give_back) -> None:
        self._measure, self._trim = measure, trim
        self._lowest_bytes = self._latest_bytes = measure()
        self._pause = self._pauses = 0  # checks to leave out, and how many after a call that gives little back

    def check(self) -> None:
        """Takes some milliseconds where it gives back: up to one for each 10 MB."""
        size_bytes = self._measure()
        if size_bytes < self._lowest_bytes + GROWTH_BYTES:
            self._lowest_bytes = min(self._lowest_bytes, size_bytes)
            self._latest_bytes, self._pause, self._pauses = size_bytes, 0, 0
            return
        if self._pause and size_bytes < self._latest_bytes + GROWTH_BYTES:
            self._pause -= 1
            return
        self._trim()
        self._latest_bytes = self._measure()
        self._lowest_bytes = min(self._lowest_bytes, self._latest_bytes)
        is_worth_it = size_bytes - self._latest_bytes >= GROWTH_BYTES // 4
        self._pauses = 0 if is_worth_it else min(2 * self._pauses + 1, MAX_PAUSES)
        self._pause = self._pauses

    async def run(self) -> None:
        """Until cancelled. In a thread: heaps of other threads are not locked meanwhile."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await asyncio.to_thread(self.check)
