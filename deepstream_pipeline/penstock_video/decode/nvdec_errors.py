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
_MOST_LINES = 1024  # that wait for who takes them
_MOST_BYTES = 65536  # read at once: all that a pipe holds
_MAX_AGE_S = 1.0
_UNBUFFERED = 2  # stdio's _IONBF


class DecodeErrors:
    """The lines that were written to a pipe. Every thread may use it."""

    def __init__(self, descriptor: int, clock: Callable[[], float] = time.monotonic) -> None:
        """descriptor: the end that is read, which does not block."""
        self._descriptor, self._clock = descriptor, clock
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)
        self._lock = threading.Lock()
        self._lines: deque[tuple[int, float]] = deque(maxlen=_MOST_LINES)
        self._rest = b""
        self.unclaimed = 0  # lines that were not taken

    def take(self, numbers: Collection[int]) -> set[int]:
        """Those of the numbers that lines name; each line is taken once."""
        with self._lock:
            self._read()
            if not self._lines:
                return set()
            taken: set[int] = set()
            kept: deque[tuple[int, float]] = deque(maxlen=_MOST_LINES)
            oldest_s = self._clock() - _MAX_AGE_S
            for number, reported_s in self._lines:
                if number in numbers and number not in taken:  # the second is another camera's
                    taken.add(number)
                elif reported_s >= oldest_s:
                    kept.append((number, reported_s))
                else:
                    self.unclaimed += 1
            self._lines = kept
            return taken

    def _read(self) -> None:
        if not self._poller.poll(0):  # as mostly, and an exception costs more
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
    """From now on the process's standard output goes to the result, and is lost if it is not taken.

    For a process that writes nothing else; once. Neither end blocks: a line written into a full pipe is lost.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    fcntl.fcntl(write_end, fcntl.F_SETFD, 0)
    os.dup2(write_end, 1)
    os.close(write_end)
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _UNBUFFERED, 0)
    return DecodeErrors(read_end)
