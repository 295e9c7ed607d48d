"""Cores that the cards' interrupts keep busy, which is no core for a process to be on.

A card says over one interrupt line that something is done, more than twice a decoded frame; the system sends a line to
one core, whose time for it counts as nobody's, or as that of whoever runs there. To the system the core looks idle in
between, so that who sleeps there is woken there. Measured on an H200's host (16 vCPUs):

* 3,840 frames/s of 720p H.264, 9,200 interrupts/s: a frame costs a decode process on that core 1,411 µs of CPU, on each
  of the other 15 cores 295 to 374 µs;
* 187 cameras, 8,100 to 8,900 interrupts/s, two windows: a batch's answer took 7 ms, and the gateway's core process 28 %
  of a core; or 39 ms and 84 %. Where it ran was not read, but nothing else tells the two apart;
* since they keep off it, rows on the card, 17 windows, 170 to 266 cameras: 6 to 11 ms, at most 41 %; rows by the host,
  one window, 204 cameras: 15 ms, 101 %.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

BUSY_PER_S = 1000.0  # of a core: some five percent of its time
MANY_PER_S = 4000.0  # some twenty percent
CALM_PER_S, CALM_S = 100.0, 60.0  # fewer come where the core is full, until it is not even asked any more
MOST_OF_ALL = 0.1  # of the interrupts that there ever were, where nothing is known of their rate
WRAP = 2**32  # the system's counters begin again there: after five days of 9,200/s

_CARDS = "bus/pci/drivers/nvidia"


class Interrupts:
    """Counts that the system keeps. Where it shows none (no card, another system), there are none."""

    def __init__(self, sys_folder: Path = Path("/sys")) -> None:
        """sys_folder: as Linux mounts it."""
        self._sys = sys_folder

    @property
    def has_cards(self) -> bool:
        """Whether NVIDIA's driver is there, and shows itself to us, with or without interrupts yet."""
        with suppress(OSError):
            return (self._sys / _CARDS).is_dir()
        return False

    def by_core(self) -> dict[int, int]:
        """All lines' of all cards so far; none where the system does not let us look."""
        found: dict[int, int] = {}
        for line in self._lines():
            with suppress(OSError, ValueError):  # the line is gone
                counts = (self._sys / "kernel/irq" / line.name / "per_cpu_count").read_text()
                for core, count in enumerate(map(int, counts.split(","))):
                    found[core] = found.get(core, 0) + count
        return found

    def _lines(self) -> list[Path]:
        with suppress(OSError):  # not for us, or the driver goes away under our eyes
            return list((self._sys / _CARDS).glob("*/msi_irqs/*"))
        return []


class InterruptWatch:
    """How often each core is interrupted. Sans-IO: `now` is monotonic seconds."""

    def __init__(self, now: float, counts: Mapping[int, int]) -> None:
        """counts: by core, up to now."""
        self._seen_at, self._counts = now, counts
        self._crowded: dict[int, float] = {}  # cores, and when they last were not calm

    def rates(self, now: float, counts: Mapping[int, int]) -> dict[int, float]:
        """Interrupts a second of each core, since it was last told; none where no time passed."""
        seconds = now - self._seen_at
        if seconds <= 0:
            return {}
        rates = {core: (count - self._counts.get(core, 0)) % WRAP / seconds for core, count in counts.items()}
        self._seen_at, self._counts = now, counts
        return rates

    def busy(self, now: float, counts: Mapping[int, int]) -> frozenset[int]:
        """Cores that were, since it was last told, too often interrupted to be a process's own."""
        return frozenset(core for core, rate in self.rates(now, counts).items() if rate > BUSY_PER_S)

    def crowded(self, now: float, counts: Mapping[int, int]) -> frozenset[int]:
        """Cores that were so often interrupted that every program is better off elsewhere, until they were calm for a
        while."""
        for core, rate in self.rates(now, counts).items():
            if rate > MANY_PER_S or (core in self._crowded and rate > CALM_PER_S):
                self._crowded[core] = now
        self._crowded = {core: at for core, at in self._crowded.items() if now - at < CALM_S}
        return frozenset(self._crowded)


def mostly_interrupted(counts: Mapping[int, int]) -> frozenset[int]:
    """The cores that had a good part of all interrupts, which will have the next, too."""
    least = max(MOST_OF_ALL * sum(counts.values()), 1)
    return frozenset(core for core, count in counts.items() if count >= least)
