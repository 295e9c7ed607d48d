"""Cores that the cards' interrupts keep busy, which is no core for a process to be alone on.

A card says over one interrupt line that something is done, more than twice a frame; the system sends a line to one
core, whose time for it counts as nobody's, or as that of whoever runs there. Measured on an H200's host (16 vCPUs;
3,840 frames/s of 720p H.264, 9,200 interrupts/s): CPU a frame of a process on that core 1,411 µs, on each of the other
15 cores 295 to 374 µs.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

BUSY_PER_S = 1000.0  # of a core: some five percent of its time
MOST_OF_ALL = 0.1  # of the interrupts that there ever were, where nothing is known of their rate

_LINES = "bus/pci/drivers/nvidia/*/msi_irqs/*"


class Interrupts:
    """Counts that the system keeps. Where it shows none (no card, another system), there are none."""

    def __init__(self, sys_folder: Path = Path("/sys")) -> None:
        """sys_folder: as Linux mounts it."""
        self._counts = [sys_folder / "kernel/irq" / line.name / "per_cpu_count" for line in sys_folder.glob(_LINES)]

    def by_core(self) -> dict[int, int]:
        """All lines' of all cards so far."""
        found: dict[int, int] = {}
        for path in self._counts:
            with suppress(OSError, ValueError):  # the line is gone
                for core, count in enumerate(map(int, path.read_text().split(","))):
                    found[core] = found.get(core, 0) + count
        return found


class InterruptWatch:
    """Which cores are interrupted all the time. Sans-IO: `now` is monotonic seconds."""

    def __init__(self, now: float, counts: Mapping[int, int]) -> None:
        """counts: by core, up to now."""
        self._seen_at, self._counts = now, counts

    def see(self, now: float, counts: Mapping[int, int]) -> frozenset[int]:
        """Those of the time since it was last told."""
        least = BUSY_PER_S * (now - self._seen_at)
        busy = frozenset(core for core, count in counts.items() if count - self._counts.get(core, 0) > least)
        self._seen_at, self._counts = now, counts
        return busy


def mostly_interrupted(counts: Mapping[int, int]) -> frozenset[int]:
    """The cores that had a good part of all interrupts, which will have the next, too."""
    least = max(MOST_OF_ALL * sum(counts.values()), 1)
    return frozenset(core for core, count in counts.items() if count >= least)
