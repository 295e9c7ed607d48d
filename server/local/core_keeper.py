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
LEAST_CORES = 8  # of fewer, one is worth more than what interrupts take of it; so many but one stay
SETTLE_LOOKS = 5  # from one time that all threads are looked at to the next: of 3,000 it takes 0.1 s
_PASSES = 8

log = get_logger("cores")


class CoreKeeper:
    """Moves the threads of a process, and of those below it, that may run wherever that process may, and back again.
    Who chose other cores keeps them. kept: the cores that they may run on."""

    def __init__(self, pid: int, interrupts: Interrupts, now: float) -> None:
        self._pid, self._interrupts = pid, interrupts
        self._all = self.kept = frozenset(os.sched_getaffinity(pid))
        self._given = {self._all}  # what a thread may run on that has not chosen
        self._looks = 0
        self._watch = InterruptWatch(now, interrupts.by_core())

    def look(self, now: float) -> None:
        """Each LOOK_S. now: monotonic seconds."""
        wanted = self._all - self._watch.crowded(now, self._interrupts.by_core())
        self._keep(wanted if len(wanted) >= LEAST_CORES - 1 else self._all)

    def give_back(self) -> None:
        """All cores, to all threads."""
        self._keep(self._all)

    def _keep(self, cores: frozenset[int]) -> None:
        is_new, self.kept = cores != self.kept, cores
        self._given.add(cores)
        self._looks += 1
        if is_new:
            left = ", ".join(map(str, sorted(self._all - cores)))
            log.info("the processes keep off cores that the card's interrupts keep busy", cores=left or "none")
        elif len(self._given) == 1 or self._looks % SETTLE_LOOKS:  # now and then, who chose to run anywhere meanwhile
            return
        for _ in range(_PASSES):  # what is started meanwhile is where that was that started it
            if not self._move():
                break

    def _move(self) -> int:
        """How many threads it moved."""
        moved = 0
        for task in _tasks_below(self._pid):
            with suppress(OSError):  # it is over, or another user's
                cores = frozenset(os.sched_getaffinity(task))
                if cores != self.kept and cores in self._given:
                    os.sched_setaffinity(task, self.kept)
                    moved += 1
        return moved


@contextmanager
def kept_off_interrupts() -> Iterator[None]:
    """For this process and all that it starts meanwhile; at the end they have all cores again. Nothing is done where
    there is no NVIDIA driver, or a machine has so few cores that each is wanted."""
    interrupts = Interrupts()
    if not interrupts.has_cards:
        yield
        return
    stopping = threading.Event()
    keeper = CoreKeeper(os.getpid(), interrupts, time.monotonic())

    def look() -> None:
        while not stopping.wait(LOOK_S):
            try:
                keeper.look(time.monotonic())
            except Exception:  # the thread's root: without it cores would be given back no more
                log.exception("the look for cores that interrupts keep busy failed unexpectedly")

    thread = threading.Thread(target=look, name="cores", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        keeper.give_back()


def _tasks_below(pid: int) -> list[int]:
    """All threads of the process and of those below it, as the system numbers them."""
    found: list[int] = []
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(OSError):  # it is over
                found += map(int, os.listdir(f"/proc/{one.pid}/task"))
    return found
