"""A folder in place of Linux' /sys: a card with one interrupt line, and how often each core was interrupted by it."""

import os
from pathlib import Path

_CORES = max(64, *(core + 1 for core in os.sched_getaffinity(0)))


class OwnSys:
    """At first no core was."""

    def __init__(self, folder: Path, line: str = "42") -> None:
        lines = folder / "bus/pci/drivers/nvidia/0000:00:06.0/msi_irqs"
        lines.mkdir(parents=True, exist_ok=True)
        (lines / line).touch()
        self._path = folder / "kernel/irq" / line / "per_cpu_count"
        self._path.parent.mkdir(parents=True)
        self._counts = [0] * _CORES
        self._write()

    def count(self, core: int, more: int) -> None:
        """So many more came to that core."""
        self._counts[core] += more
        self._write()

    def _write(self) -> None:
        """At once: a reader sees the old counts or the new."""
        new = self._path.with_suffix(".new")
        new.write_text(",".join(map(str, self._counts)) + "\n")
        new.replace(self._path)
