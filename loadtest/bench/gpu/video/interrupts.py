"""The core that the card's interrupts go to, beside a window: the driver's work for all streams is done there."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from server.local.card_interrupts import Interrupts, InterruptWatch


@dataclass(frozen=True, slots=True)
class CoreLook:
    """counts: interrupts of the cards so far, by core. idle_s: of each core so far. at_s: monotonic."""

    at_s: float
    counts: Mapping[int, int]
    idle_s: Mapping[int, float]


def look_at_cores() -> CoreLook:
    """As it is now."""
    idle_s = {core: times.idle + times.iowait for core, times in enumerate(psutil.cpu_times(percpu=True))}
    return CoreLook(time.monotonic(), Interrupts().by_core(), idle_s)


def interrupted_between(before: CoreLook, after: CoreLook) -> dict[str, float]:
    """per_s: interrupts of the cards. core: the one that got most, its busy share, and the others' in the middle.

    What a core does for an interrupt the system may count as nobody's time: busy is all that is not idle. Empty where
    there were no interrupts.
    """
    seconds = after.at_s - before.at_s
    rates = InterruptWatch(before.at_s, before.counts).rates(after.at_s, after.counts)
    core = max(rates, key=lambda one: rates[one], default=-1)
    if core not in after.idle_s or not rates[core]:
        return {}
    busy = {one: 1 - min((idle - before.idle_s.get(one, 0.0)) / seconds, 1.0) for one, idle in after.idle_s.items()}
    others = [share for one, share in busy.items() if one != core]
    return {
        "per_s": sum(rates.values()),
        "core": core,
        "busy": busy[core],
        "others_busy": sum(others) / max(len(others), 1),
    }
