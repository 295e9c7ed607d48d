"""A program and all that it started keep off the cores that the cards' interrupts keep busy."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from server.local.card_interrupts import Interrupts, InterruptWatch
from server.logs import get_logger

LOOK_S = 2.0
LEAST_CORES = 8  # of fewer, one is worth more than what interrupts take of it
_PASSES = 8

log = get_logger("cores")


class CoreKeeper:
    """Moves the threads of a process, and of those below it, that may run on any core. Who has chosen its cores keeps
    them. kept: the cores that they may run on."""

    def __init__(self, pid: int, interrupts: Interrupts, now: float) -> None:
        self._pid, self._interrupts = pid, interrupts
        self._all = self.kept = frozenset(os.sched_getaffinity(pid))
        self._watch = InterruptWatch(now, interrupts.by_core())

    def look(self, now: float) -> None:
        """Each LOOK_S. now: monotonic seconds."""
        crowded = self._watch.crowded(now, self._interrupts.by_core())
        wanted = self._all - crowded if len(self._all) >= LEAST_CORES else self._all
        former, self.kept = self.kept, wanted or self._all
        if self.kept == former:
            return
        for _ in range(_PASSES):  # what is started meanwhile is where that was that started it
            if not self._move(former):
                break
        left = ", ".join(map(str, sorted(self._all - self.kept)))
        log.info("the processes keep off cores that the card's interrupts keep busy", cores=left or "none")

    def _move(self, former: frozenset[int]) -> int:
        """How many threads it moved."""
        moved = 0
        for task in _tasks_below(self._pid):
            with suppress(OSError):  # it is over, or another user's
                if os.sched_getaffinity(task) == former:
                    os.sched_setaffinity(task, self.kept)
                    moved += 1
        return moved


@contextmanager
def kept_off_interrupts() -> Iterator[None]:
    """For this process and all that it starts meanwhile. Nothing is done where there is no NVIDIA driver, or a machine
    has so few cores that each is wanted."""
    interrupts = Interrupts()
    if not interrupts.has_cards:
        yield
        return
    stopping = threading.Event()
    keeper = CoreKeeper(os.getpid(), interrupts, time.monotonic())

    def look() -> None:
        while not stopping.wait(LOOK_S):
            keeper.look(time.monotonic())

    thread = threading.Thread(target=look, name="cores", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(LOOK_S)


def _tasks_below(pid: int) -> list[int]:
    """All threads of the process and of those below it, as the system numbers them."""
    found: list[int] = []
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(OSError):  # it is over
                found += map(int, os.listdir(f"/proc/{one.pid}/task"))
    return found
