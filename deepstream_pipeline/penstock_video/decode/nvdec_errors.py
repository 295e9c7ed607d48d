"""Detects pictures that NVDEC concealed. Its library reports them only as lines on the process's C stdout."""

import ctypes
import fcntl
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

_LINE = re.compile(rb"Decode Error occurred for picture (\d+)")
_MOST_LINES = 1024  # waiting to be taken
_MOST_BYTES = 65536  # read at once: the capacity of a pipe
_MAX_AGE_S = 1.0
_UNBUFFERED = 2  # stdio's _IONBF


class DecodeErrors:
    """Reads the lines from a pipe. Thread-safe."""

    def __init__(self, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        """descriptor: the read end, non-blocking."""
        self._descriptor, self._clock = descriptor, clock
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)
        self._lock = threading.Lock()
        self._lines: deque[tuple[int, float]] = deque(maxlen=_MOST_LINES)
        self._rest = b""
        self.unclaimed = 0  # lines that were not taken

    def take(self, numbers: Collection[int]) -> set[int]:
        """Those of the numbers that lines report; each line is taken once."""
        with self._lock:
            self._read()
            if not self._lines:
                return set()
            taken: set[int] = set()
            kept: deque[tuple[int, float]] = deque(maxlen=_MOST_LINES)
            oldest_s = self._clock() - _MAX_AGE_S
            for number, reported_s in self._lines:
                if number in numbers and number not in taken:  # a second line is another camera's
                    taken.add(number)
                elif reported_s >= oldest_s:
                    kept.append((number, reported_s))
                else:
                    self.unclaimed += 1
            self._lines = kept
            return taken

    def _read(self) -> None:
        if not self._poller.poll(0):  # usually empty, and an exception costs more
            return
        read = os.read(self._descriptor, _MOST_BYTES)
        *lines, rest = (self._rest + read).split(b"\n")
        self._rest = rest[-len(b"Decode Error occurred for picture ") - 20 :]
        now = self._clock()
        for line in lines:
            found = _LINE.search(line)
            if found:
                self.unclaimed += len(self._lines) == _MOST_LINES
                self._lines.append((int(found[1]), now))


def watch_stdout() -> DecodeErrors:
    """Redirects standard output to the result, once. Lines that do not fit into the pipe are lost."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    fcntl.fcntl(write_end, fcntl.F_SETFD, 0)
    os.dup2(write_end, 1)
    os.close(write_end)
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _UNBUFFERED, 0)
    return DecodeErrors(read_end)
