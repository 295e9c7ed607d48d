"""The core that the card's interrupts go to, beside a window: the driver's work for all streams is done there."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.local.card_interrupts import WRAP, Interrupts

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = re.compile(r"^cpu(\d+) \d+ \d+ \d+ (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CoreLook:
    """counts: interrupts of the cards so far, by core. idle_s: of each core so far. at_s: monotonic."""

    at_s: float
    counts: Mapping[int, int]
    idle_s: Mapping[int, float]


def look_at_cores(stat: Path = Path("/proc/stat")) -> CoreLook:
    """As it is now; nothing of what the system does not tell."""
    text = stat.read_text() if stat.is_file() else ""
    idle_s = {int(core): int(ticks) / _TICKS for core, ticks in _IDLE.findall(text)}
    return CoreLook(time.monotonic(), Interrupts().by_core(), idle_s)


def interrupted_between(before: CoreLook, after: CoreLook) -> dict[str, float]:
    """per_s: interrupts of the cards. core: the one that got most, its busy share, and the others' in the middle.

    What a core does for an interrupt the system may count as nobody's time: busy is all that is not idle. Empty where
    there were no interrupts.
    """
    seconds = after.at_s - before.at_s
    came = {core: (count - before.counts.get(core, 0)) % WRAP for core, count in after.counts.items()}
    core = max(came, key=lambda one: came[one], default=-1)
    if seconds <= 0 or core not in after.idle_s or not came[core]:
        return {}
    busy = {one: 1 - min((idle - before.idle_s.get(one, 0.0)) / seconds, 1.0) for one, idle in after.idle_s.items()}
    others = [share for one, share in busy.items() if one != core]
    return {
        "per_s": sum(came.values()) / seconds,
        "core": core,
        "busy": busy[core],
        "others_busy": sum(others) / max(len(others), 1),
    }
