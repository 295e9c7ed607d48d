"""A closed loop: so many callers, each asking again as soon as it is answered.

It measures what a system carries at a concurrency. It hides queueing, so no latency target is judged by it.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Call = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Lap:
    """One measured stretch. rate: answers a second. Latencies in milliseconds, of the answers in the stretch."""

    rate: float
    p50_ms: float
    p99_ms: float
    count: int


async def run_closed_loop(call: Call, *, concurrency: int, seconds: float) -> Lap:
    """Runs the callers for that long. call gets 0, 1, 2, …; what it raises ends the lap."""
    latencies_s: list[float] = []
    numbers = iter(range(1 << 62))
    started = time.perf_counter()
    until = started + seconds

    async def caller() -> None:
        while (begun := time.perf_counter()) < until:
            await call(next(numbers))
            latencies_s.append(time.perf_counter() - begun)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(caller())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return make_lap(latencies_s, time.perf_counter() - started)


def make_lap(latencies_s: list[float], elapsed_s: float) -> Lap:
    """The lap of these answers."""
    ordered = sorted(latencies_s)
    return Lap(len(ordered) / elapsed_s, _quantile_ms(ordered, 0.5), _quantile_ms(ordered, 0.99), len(ordered))


def _quantile_ms(ordered: list[float], quantile: float) -> float:
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] * 1000 if ordered else math.nan
