"""Memory that malloc keeps after it was freed, given back to the system.

malloc gives back what lies at the end of its heaps alone: after 404 hostile pictures of up to 30 MB the gateway kept
200 MB that nothing used.
"""

import asyncio
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

CHECK_EVERY_S = 10.0
GROWTH_BYTES = 24 << 20  # below it giving back costs more page faults than it is worth
_STATM = Path("/proc/self/statm")


def private_bytes() -> int:
    """Resident memory of this process without what it shares with others: its heaps, above all."""
    _, resident, shared, *_ = _STATM.read_bytes().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def malloc_trim() -> None:
    """Gives back every free page of every heap. Without glibc it does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """Calls `trim` where memory has grown by GROWTH_BYTES since it was called last."""

    def __init__(self, measure: Callable[[], int] = private_bytes, trim: Callable[[], None] = malloc_trim) -> None:
        self._measure, self._trim = measure, trim
        self._usual_bytes = measure()

    def check(self) -> None:
        """Takes some milliseconds where it gives back: up to one for each 10 MB."""
        size_bytes = self._measure()
        if size_bytes < self._usual_bytes + GROWTH_BYTES:
            self._usual_bytes = min(self._usual_bytes, size_bytes)
            return
        self._trim()
        self._usual_bytes = self._measure()

    async def run(self) -> None:
        """Until cancelled. In a thread: heaps of other threads are not locked meanwhile."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await asyncio.to_thread(self.check)
