"""Moves a program and its children off the CPU cores that handle a GPU's interrupts.

All interrupts go to one core, which looks idle to the scheduler, but where a frame costs about four times the CPU time.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from penstock.logs import get_logger

BUSY_PER_S = 1000.0  # about five percent of a core's time
MANY_PER_S = 4000.0  # about twenty percent
CALM_PER_S, CALM_S = 100.0, 60.0  # fewer interrupts arrive while the core is busy
MOST_OF_ALL = 0.1  # share of all interrupts since boot, used while no rate is known
WRAP = 2**32  # the kernel's counters wrap there, after five days of 9,200/s

_CARDS = "bus/pci/drivers/nvidia"


class Interrupts:
    """The kernel's interrupt counts of NVIDIA GPUs; empty without a GPU or on another system."""

    def __init__(self, sys_folder: Path = Path("/sys")) -> None:
        self._sys = sys_folder

    @property
    def has_cards(self) -> bool:
        """Whether NVIDIA's driver is loaded and visible, even without interrupts yet."""
        with suppress(OSError):
            return (self._sys / _CARDS).is_dir()
        return False

    def by_core(self) -> dict[int, int]:
        """Interrupts of all GPUs since boot by core; empty if the system does not show them."""
        found: dict[int, int] = {}
        for line in self._lines():
            with suppress(OSError, ValueError):  # the interrupt line is gone
                counts = (self._sys / "kernel/irq" / line.name / "per_cpu_count").read_text()
                for core, count in enumerate(map(int, counts.split(","))):
                    found[core] = found.get(core, 0) + count
        return found

    def _lines(self) -> list[Path]:
        with suppress(OSError):  # no permission, or the driver is being unloaded
            return list((self._sys / _CARDS).glob("*/msi_irqs/*"))
        return []


class InterruptWatch:
    """Interrupt rates of the cores. Sans-IO: `now` is monotonic seconds."""

    def __init__(self, now: float, counts: Mapping[int, int]) -> None:
        """counts: by core, since boot."""
        self._seen_at, self._counts = now, counts
        self._crowded: dict[int, float] = {}  # cores, and when they were last not calm

    def rates(self, now: float, counts: Mapping[int, int]) -> dict[int, float]:
        """Interrupts per second of each core since the last call; empty if no time passed."""
        seconds = now - self._seen_at
        if seconds <= 0:
            return {}
        rates = {core: (count - self._counts.get(core, 0)) % WRAP / seconds for core, count in counts.items()}
        self._seen_at, self._counts = now, counts
        return rates

    def busy(self, now: float, counts: Mapping[int, int]) -> frozenset[int]:
        """Cores with too many interrupts since the last call to be reserved for one process."""
        return frozenset(core for core, rate in self.rates(now, counts).items() if rate > BUSY_PER_S)

    def crowded(self, now: float, counts: Mapping[int, int]) -> frozenset[int]:
        """Cores to avoid, from a high rate until they were calm for CALM_S."""
        for core, rate in self.rates(now, counts).items():
            if rate > MANY_PER_S or (core in self._crowded and rate > CALM_PER_S):
                self._crowded[core] = now
        self._crowded = {core: at for core, at in self._crowded.items() if now - at < CALM_S}
        return frozenset(self._crowded)


def mostly_interrupted(counts: Mapping[int, int]) -> frozenset[int]:
    """Cores with a large share of all interrupts since boot, which will probably get the next ones."""
    least = max(MOST_OF_ALL * sum(counts.values()), 1)
    return frozenset(core for core, count in counts.items() if count >= least)


LOOK_S = 2.0
LEAST_CORES = 8  # with fewer cores, a core is worth more than its interrupts cost; all but one stay usable
SETTLE_LOOKS = 5  # looks between two checks of all threads, which take 0.1 s for 3,000
_PASSES = 8

log = get_logger("cores")


class AffinityController:
    """Moves threads of a process and its descendants off crowded cores, unless they set their own affinity."""

    def __init__(self, pid: int, interrupts: Interrupts, now: float) -> None:
        self._pid, self._interrupts = pid, interrupts
        self._all = self.kept = frozenset(os.sched_getaffinity(pid))
        self._given = {self._all}  # affinities of threads that have not set their own
        self._looks = 0
        self._watch = InterruptWatch(now, interrupts.by_core())

    def look(self, now: float) -> None:
        """Call it each LOOK_S. now: monotonic seconds."""
        wanted = self._all - self._watch.crowded(now, self._interrupts.by_core())
        self._keep(wanted if len(wanted) >= LEAST_CORES - 1 else self._all)

    def give_back(self) -> None:
        """Allows all cores to all threads."""
        self._keep(self._all)

    def _keep(self, cores: frozenset[int]) -> None:
        is_new, self.kept = cores != self.kept, cores
        self._given.add(cores)
        self._looks += 1
        if is_new:
            left = ", ".join(map(str, sorted(self._all - cores)))
            log.info("avoiding cores that GPU interrupts keep busy", cores=left or "none")
        elif len(self._given) == 1 or self._looks % SETTLE_LOOKS:  # periodically, for threads that reset their affinity
            return
        for _ in range(_PASSES):  # a thread that is started meanwhile inherits its parent's affinity
            if not self._move():
                break

    def _move(self) -> int:
        moved = 0
        for task in _tasks_below(self._pid):
            with suppress(OSError):  # the thread has ended, or is another user's
                cores = frozenset(os.sched_getaffinity(task))
                if cores != self.kept and cores in self._given:
                    os.sched_setaffinity(task, self.kept)
                    moved += 1
        return moved


@contextmanager
def avoid_interrupted_cores() -> Iterator[None]:
    """Runs an AffinityController for this process and its descendants, if there is a GPU and enough cores."""
    interrupts = Interrupts()
    if not interrupts.has_cards:
        yield
        return
    stopping = threading.Event()
    affinity = AffinityController(os.getpid(), interrupts, time.monotonic())

    def look() -> None:
        while not stopping.wait(LOOK_S):
            try:
                affinity.look(time.monotonic())
            except Exception:  # the thread's root: if it ended, cores would never be given back
                log.exception("checking GPU interrupts failed unexpectedly")

    thread = threading.Thread(target=look, name="cores", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        affinity.give_back()


def _tasks_below(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(OSError):  # it has ended
                found += map(int, os.listdir(f"/proc/{one.pid}/task"))
    return found
