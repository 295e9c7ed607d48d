"""Which descriptors the sources' thread waits for: of each process its socket and its end, and one to be woken by."""

import os
import selectors
import threading
from contextlib import suppress
from typing import Generic, TypeVar

from deepstream_pipeline.sources.line import Line

Owner = TypeVar("Owner")
_POLL_S = 0.1  # for the end of a process, where the system has no descriptor for it


class Bell:
    """Wakes a thread that waits for its descriptor; from any thread, also after it was closed."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_rung = False

    def ring(self) -> None:
        if self._is_rung:  # it was not heard yet, and who rang left what it rang for before
            return
        with self._lock:
            if self.descriptor >= 0:
                self._is_rung = True
                os.eventfd_write(self.descriptor, 1)

    def heard(self) -> None:
        """Before one looks for what it was rung for."""
        if not self._is_rung:
            return
        with self._lock:  # not between another's two steps: what it writes then would wake its hearer for ever
            with suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)
            self._is_rung = False

    def close(self) -> None:
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1


class Wires(Generic[Owner]):
    """Of one thread. A process is known from `connect` to `cut`."""

    def __init__(self, bell: Bell) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(bell.descriptor, selectors.EVENT_READ)
        self._interest: dict[Line, int] = {}
        self._without_pidfd: dict[Line, Owner] = {}

    def connect(self, process: Line, owner: Owner) -> None:
        self._interest[process] = selectors.EVENT_READ
        self._selector.register(process.socket, selectors.EVENT_READ, (owner, process, True))
        if process.pidfd >= 0:
            self._selector.register(process.pidfd, selectors.EVENT_READ, (owner, process, False))
        else:
            self._without_pidfd[process] = owner

    def update(self, process: Line, *, is_heard: bool) -> None:
        """What is waited for at its socket follows from whether it is heard, and whether it is behind with reading."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.is_behind else 0)
        if not is_heard or process.has_hung_up:
            wanted = 0
        before = self._interest.get(process)
        if before is None or before == wanted:
            return
        self._interest[process] = wanted
        if not wanted:
            self._selector.unregister(process.socket)
        elif not before:
            raise RuntimeError("a process that is not heard any more is not heard again")
        else:
            self._selector.modify(process.socket, wanted, self._selector.get_key(process.socket).data)

    def poll(self, process: Line, owner: Owner) -> None:
        """Its end is seen, and not yet what it was: look again soon, instead of waiting for what is there."""
        if process not in self._without_pidfd:
            self._selector.unregister(process.pidfd)
            self._without_pidfd[process] = owner

    def cut(self, process: Line) -> None:
        """Before its descriptors are closed."""
        if self._interest.pop(process, 0):
            self._selector.unregister(process.socket)
        if self._without_pidfd.pop(process, None) is None and process.pidfd >= 0:
            self._selector.unregister(process.pidfd)

    def wait(self, timeout_s: float) -> list[tuple[Owner, Line, bool]]:
        """(owner, process, whether its socket has something; else its end). Nothing where only the bell rang."""
        timeout_s = min(timeout_s, _POLL_S) if self._without_pidfd else timeout_s
        events = [key.data for key, _ in self._selector.select(timeout_s) if key.data is not None]
        events += [(owner, process, False) for process, owner in self._without_pidfd.items()]
        return events

    def close(self) -> None:
        self._selector.close()
