"""Reserves a CPU core for a decode process, by lock files that all decode processes of this user share."""

import fcntl
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from penstock.gateway.workers.interrupt_affinity import Interrupts, InterruptWatch, mostly_interrupted

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def open_lock(name: str) -> int | None:
    """Descriptor of the lock file, owned by the caller; None if others may write to its folder."""
    try:
        path = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        folder = os.open(path, _FOLDER_FLAGS)
    except OSError:
        return None
    try:
        return os.open(name, _FILE_FLAGS, 0o600, dir_fd=folder) if _is_ours_alone(folder) else None
    except OSError:
        return None
    finally:
        os.close(folder)


def _is_ours_alone(folder: int) -> bool:
    """Whether only this user can write to the open folder."""
    status = os.fstat(folder)
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


LOOK_S = 2.0  # interval of checks of the interrupts
_LOOKS = 8


class OwnCore:
    """The process's own core. number: as in the system. Thread-safe."""

    def __init__(self, number: int, descriptor: int, cores: Collection[int]) -> None:
        """descriptor: of its locked file. cores: those that the process could use before."""
        self.number = number
        self._descriptor, self._cores = descriptor, set(cores)
        self._lock = threading.Lock()
        self._is_left = False

    def leave(self) -> None:
        """Lets the process use all cores again, and frees this one for others. May be called again."""
        with self._lock:
            if not self._is_left:
                self._is_left = True
                self._go(self._cores)

    def move(self, busy: Collection[int]) -> None:
        """Moves the process to a free core that is not busy, or off the busy cores. Does nothing after `leave`."""
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
        """Starts moving away from cores that GPU interrupts make busy. Call it once."""
        threading.Thread(target=self._watch, args=(interrupts,), name="own core", daemon=True).start()

    def _watch(self, interrupts: Interrupts) -> None:
        watch, before = InterruptWatch(time.monotonic(), interrupts.by_core()), frozenset[int]()
        while not self._is_left:
            time.sleep(LOOK_S)
            busy = watch.busy(time.monotonic(), interrupts.by_core())
            if self.number in busy & before:  # a single check may be a peak
                self.move(busy)
            before = busy

    def _go(self, cores: Collection[int]) -> None:
        """Moves all threads, and frees the core for other processes."""
        for _ in range(_LOOKS):  # a thread started meanwhile inherits its parent's affinity
            pinned = [task for task in _tasks() if _may_run_on(task) == {self.number}]
            for task in pinned:
                with suppress(OSError):  # it has ended
                    os.sched_setaffinity(task, cores)
            if not pinned:
                break
        os.close(self._descriptor)


def pin_to_own_core(interrupts: Interrupts) -> OwnCore | None:
    """The core on which this thread and its later children stay, or None. Call it once, before other threads start."""
    cores = sorted(os.sched_getaffinity(0))
    interrupted = mostly_interrupted(interrupts.by_core())
    taken = _take_one_of([core for core in cores if core not in interrupted]) or _take_one_of(
        [core for core in cores if core in interrupted]
    )
    return OwnCore(*taken, cores) if taken is not None else None


def _take_one_of(cores: Collection[int]) -> tuple[int, int] | None:
    """The number of a random free core, now this thread's, and the descriptor of its lock."""
    for core in random.sample(list(cores), len(cores)):
        descriptor = _taken(core)
        if descriptor is not None:
            return core, descriptor
    return None


def _tasks() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _may_run_on(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except ProcessLookupError:  # it has ended
        return set()


def _taken(core: int) -> int | None:
    """Descriptor of the core's lock, which ends when it is closed; None if another process has it."""
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
