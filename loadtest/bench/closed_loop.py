"""A closed loop of callers, and the CPU time that each process spent on it."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from penstock_load.witness.process_cpu import CpuMeter

Call = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Repetition:
    """One measured stretch. rate: answers a second. Latencies in milliseconds, of the answers in the stretch."""

    rate: float
    p50_ms: float
    p99_ms: float
    count: int


async def run_closed_loop(call: Call, *, concurrency: int, seconds: float) -> Repetition:
    """Runs the callers for that long. call gets 0, 1, 2, …; an exception of it ends the repetition."""
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
    return make_repetition(latencies_s, time.perf_counter() - started)


def make_repetition(latencies_s: list[float], elapsed_s: float) -> Repetition:
    """The repetition with these latencies."""
    ordered = sorted(latencies_s)
    p50_ms, p99_ms = quantile(ordered, 0.5) * 1000, quantile(ordered, 0.99) * 1000
    return Repetition(len(ordered) / elapsed_s, p50_ms, p99_ms, len(ordered))


def quantile(ordered: Sequence[float], share: float) -> float:
    """By nearest rank: one that was measured; NaN of nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


@dataclass(frozen=True, slots=True)
class MeasuredRepetition:
    """One repetition and its CPU milliseconds for each answer; gateway_ms is about 0 if the gateway was not used."""

    timing: Repetition
    gateway_ms: float
    triton_ms: float
    client_ms: float


@dataclass(frozen=True, slots=True)
class Meters:
    """Whose CPU time is read."""

    gateway: CpuMeter
    triton: CpuMeter

    async def measure(self, call: Call, *, concurrency: int, seconds: float) -> MeasuredRepetition:
        """Runs one repetition and reads the CPU time of each program."""
        before = (self.gateway.read_s(), self.triton.read_s(), time.process_time())
        timing = await run_closed_loop(call, concurrency=concurrency, seconds=seconds)
        after = (self.gateway.read_s(), self.triton.read_s(), time.process_time())
        gateway, triton, client = ((b - a) * 1000 / max(timing.count, 1) for a, b in zip(before, after, strict=True))
        return MeasuredRepetition(timing, gateway, triton, client)
