"""An alarm that rings at a moment of the monotonic clock, to some tens of microseconds.

A timer of asyncio or uvloop is rounded to its loop's resolution (uvloop: 1 ms, and never early). Linux has timerfd:
a file that becomes readable at the moment, which any loop can watch.
"""

import asyncio
import ctypes
import errno
import math
import os
import sys
from collections.abc import Callable
from typing import Protocol

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1  # linux/time.h, linux/timerfd.h
_NANOSECONDS = 1_000_000_000


class Alarm(Protocol):
    """Rings once for each set; a later set replaces an earlier one."""

    def set(self, at_s: float) -> None:
        """Rings at that moment, or as soon as the loop turns where it is past."""
        ...

    def close(self) -> None:
        """Does not ring any more."""
        ...


MakeAlarm = Callable[[Callable[[], None]], Alarm]


def make_alarm(on_ring: Callable[[], None]) -> Alarm:
    """The most precise alarm that this platform has, on the running loop."""
    return TimerfdAlarm(on_ring) if sys.platform == "linux" else LoopAlarm(on_ring)


class _Itimerspec(ctypes.Structure):
    """struct itimerspec: the interval (none), then the moment; each as seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerfdAlarm:
    """By Linux's timerfd. Owns a file; close() it. Raises OSError where the kernel has none."""

    def __init__(self, on_ring: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = _checked(self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop = asyncio.get_running_loop()
        self._on_ring = on_ring
        self._moment = _Itimerspec()
        self._loop.add_reader(self._file, self._ring)

    def set(self, at_s: float) -> None:
        """Rings at that moment."""
        moment_ns = max(1, math.ceil(at_s * _NANOSECONDS))  # 0 would disarm it
        self._moment.value_s, self._moment.value_ns = divmod(moment_ns, _NANOSECONDS)
        _checked(self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(self._moment), None))

    def close(self) -> None:
        """Gives the file back."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _ring(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # set anew since the loop saw that it was due
            return
        self._on_ring()


class LoopAlarm:
    """By the loop's own timers, where there is no timerfd; as precise as the loop is. The loop's clock is taken for
    the monotonic clock, as it is in asyncio."""

    def __init__(self, on_ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_ring = on_ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        """Rings at that moment."""
        self.close()
        self._handle = self._loop.call_at(at_s, self._on_ring)

    def close(self) -> None:
        """Takes the timer back."""
        if self._handle:
            self._handle.cancel()
            self._handle = None


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, f"timerfd: {os.strerror(number)}")
    return result
