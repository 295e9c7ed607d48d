"""A core of its own for a decode process: its code and its cameras' data stay in that core's cache.

Measured on an H200's host (16 vCPUs), 16 cameras of 720p H.264 at 30/s in one process, CPU of it a frame: 826 µs where
its threads may run on any core, 713 µs on two, 582 µs on one; p50 of a frame's way 2.8 and 1.9 ms, p99 4.2 and 3.7. A
thread that wakes on a cold core pays 220 to 270 µs for a call of the decoder's library that costs 59 µs on a warm one.

Which core is chance; that no other decode process of this user has it is a lock on a file (`decode.lock_files`). Not
more is kept than that: the engine, the gateway and all other programs may run on that core as well, containers do not
see each other's locks and may choose the same one, and two logical cores of one physical core are two to it.

A core that had a good part of the cards' interrupts is the last that is taken; one that they keep busy is left.

A process that is given a file to read at full speed leaves its core, for as long as it lives: it is to have as many as
it can use.
"""

import fcntl
import os
import random
import threading
import time
from collections.abc import Collection
from contextlib import suppress

from deepstream_pipeline.decode.lock_files import open_lock
from deepstream_pipeline.infer.machine import Interrupts, InterruptWatch, mostly_interrupted

LOOK_S = 2.0  # at the interrupts
_LOOKS = 8


class OwnCore:
    """The process's. number: as the system counts cores. Every thread may use it."""

    def __init__(self, number: int, descriptor: int, cores: Collection[int]) -> None:
        """descriptor: of the file with its lock. cores: that the process may use else."""
        self.number = number
        self._descriptor, self._cores = descriptor, set(cores)
        self._lock = threading.Lock()
        self._is_left = False

    def leave(self) -> None:
        """Every thread of the process may run on all cores again, and another process have this one. A second call does
        nothing."""
        with self._lock:
            if not self._is_left:
                self._is_left = True
                self._go(self._cores)

    def move(self, busy: Collection[int]) -> None:
        """To a core that is none of the busy ones; where none is free, the process leaves its core and may run on all
        but those. One that has left it stays as it is."""
        with self._lock:
            if self._is_left:
                return
            taken = _take_one_of([core for core in self._cores if core not in busy and core != self.number])
            if taken is None:
                self._is_left = True
                self._go(self._cores.difference(busy) or self._cores)
            else:
                self._go({taken[0]})
                self.number, self._descriptor = taken

    def keep_off(self, interrupts: Interrupts) -> None:
        """From now on it moves away from a core that the cards' interrupts keep busy. Called once."""
        threading.Thread(target=self._watch, args=(interrupts,), name="own core", daemon=True).start()

    def _watch(self, interrupts: Interrupts) -> None:
        watch, before = InterruptWatch(time.monotonic(), interrupts.by_core()), frozenset[int]()
        while not self._is_left:
            time.sleep(LOOK_S)
            busy = watch.busy(time.monotonic(), interrupts.by_core())
            if self.number in busy & before:  # one look may see what a start alone makes
                self.move(busy)
            before = busy

    def _go(self, cores: Collection[int]) -> None:
        """All threads, and another process may have the core."""
        for _ in range(_LOOKS):  # a thread that is started meanwhile is where the one was that started it
            pinned = [task for task in _tasks() if _may_run_on(task) == {self.number}]
            for task in pinned:
                with suppress(OSError):  # it is over
                    os.sched_setaffinity(task, cores)
            if not pinned:
                break
        os.close(self._descriptor)


def pin_to_own_core(interrupts: Interrupts) -> OwnCore | None:
    """The core on which this thread, and what it starts from now on, stays.

    None, and all is as it was, where each core has its process, or the system has no lock or no pinning for us. Called
    once, before any other thread: those that there are keep their cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    interrupted = mostly_interrupted(interrupts.by_core())
    taken = _take_one_of([core for core in cores if core not in interrupted]) or _take_one_of(
        [core for core in cores if core in interrupted]
    )
    return OwnCore(*taken, cores) if taken is not None else None


def _take_one_of(cores: Collection[int]) -> tuple[int, int] | None:
    """The number of one that is this thread's now, chosen by chance, and the descriptor of its lock."""
    for core in random.sample(list(cores), len(cores)):
        descriptor = _taken(core)
        if descriptor is not None:
            return core, descriptor
    return None


def _tasks() -> list[int]:
    """The process's threads, as the system numbers them."""
    return [int(name) for name in os.listdir("/proc/self/task")]


def _may_run_on(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except ProcessLookupError:  # it is over
        return set()


def _taken(core: int) -> int | None:
    """The descriptor of its lock, which lasts as long as that is open; None where it is not this process's now."""
    descriptor = open_lock(f"core-{core}.lock")
    if descriptor is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.sched_setaffinity(0, {core})
    except OSError:  # another process has it, or the system refuses
        os.close(descriptor)
        return None
    return descriptor
