"""The library search path, and returning freed memory, of which malloc returns only the end of its heaps."""

import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

LIBRARY_PATH_VARIABLE = "LD_LIBRARY_PATH"


def remove_working_directory() -> None:
    """Removes the working directory from the library path, where another user may have put a library."""
    paths = ":".join(filter(None, os.environ.get(LIBRARY_PATH_VARIABLE, "").split(":")))
    if paths:
        os.environ[LIBRARY_PATH_VARIABLE] = paths
    else:
        os.environ.pop(LIBRARY_PATH_VARIABLE, None)


CHECK_EVERY_S = 10.0
GROWTH_BYTES = 24 << 20  # for less, the page faults cost more than the memory is worth
MAX_PAUSES = 15
_STATM = Path("/proc/self/statm")


def private_bytes() -> int:
    """Resident memory of this process that is not shared with others, mainly its heaps."""
    _, resident, shared, *_ = _STATM.read_bytes().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def trim_memory() -> None:
    """Collects garbage, then returns every free page of every heap to the system (glibc only)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryTrimmer:
    """Calls `trim` while memory is GROWTH_BYTES above its minimum; less often if that returns little."""

    def __init__(self, measure: Callable[[], int] = private_bytes, trim: Callable[[], None] = trim_memory) -> None:
        self._measure, self._trim = measure, trim
        self._lowest_bytes = self._latest_bytes = measure()
        self._pause = self._pauses = 0  # checks to skip, and how many after a call that returns little

    def check(self) -> None:
        """If it returns memory, it takes up to a millisecond for each 10 MB."""
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
        """Runs until cancelled. It trims in a thread, which does not lock the heaps of other threads."""
        import asyncio  # here, since decoder processes have no event loop, and start often

        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await asyncio.to_thread(self.check)
