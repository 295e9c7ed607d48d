"""Page-locked host memory for copies to and from a GPU: blocks that answers lend, and parallel copies into staging.

A new array of some megabytes costs more time than its copy from the GPU, because its pages are mapped at first use.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np

from .cudart import CudaError
from .threads import available_cores

_MAX_LENT = 8  # blocks of one session; answers beyond are copied
_PARALLEL_BYTES = 1 << 20  # below, one thread is faster
_MAX_COPY_THREADS = 4

_idle: dict[int, list[Any]] = {}  # blocks by size; never freed, because an answer may outlive its session


class _Lease:
    """Returns the block when no array of it is left. Takes no lock: the garbage collector may call it anywhere."""

    def __init__(self, block: Any, idle: list[Any], tokens: list[None]) -> None:
        self.__array_interface__ = block.__array_interface__
        self._block, self._idle, self._tokens = block, idle, tokens

    def __del__(self) -> None:
        self._idle.append(self._block)
        self._tokens.append(None)


class LentBlocks:
    """Blocks for the outputs of one session. allocate: page-locked memory of that size in bytes."""

    def __init__(self, size: int, allocate: Callable[[int], Any]) -> None:
        self._size = 1 << max(size - 1, 1).bit_length()
        self._allocate = allocate
        self._tokens: list[None] = [None] * _MAX_LENT

    def take(self) -> Any | None:
        """A block of at least the size, lent as long as an array of it exists; None if there is no other."""
        try:
            self._tokens.pop()
        except IndexError:
            return None
        idle = _idle.setdefault(self._size, [])
        try:
            block = idle.pop()
        except IndexError:
            try:
                block = self._allocate(self._size)
            except CudaError:  # the machine has no more memory to page-lock
                self._tokens.append(None)
                return None
        return np.asarray(_Lease(block, idle, self._tokens))


def copy_in_parallel(target: Any, source: Any, threads: int | None = None) -> None:
    """Copies source into target, arrays of the same shape. threads: for large ones; None by the machine's cores."""
    count = _copy_threads() if threads is None else threads
    if source.nbytes < _PARALLEL_BYTES or count == 1:
        np.copyto(target, source)
    elif len(source) == 1:
        copy_in_parallel(target[0], source[0], count)
    else:
        step = -(-len(source) // count)
        parts = [slice(begin, begin + step) for begin in range(0, len(source), step)]
        done = [_pool().submit(np.copyto, target[part], source[part]) for part in parts[1:]]
        np.copyto(target[parts[0]], source[parts[0]])
        wait(done)


@cache
def _copy_threads() -> int:
    return max(1, min(_MAX_COPY_THREADS, available_cores() // 4))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_COPY_THREADS, thread_name_prefix="staging")
