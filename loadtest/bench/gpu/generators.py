"""The processes that make the load, so that nothing else of the bench holds it up."""

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Self, TypeVar

from loadtest.bench.gpu.closed import CallersLap, Lane, run_callers
from loadtest.bench.gpu.opened import Schedule, ScheduleLap, run_schedule

START_S = 0.15  # from the plan to the first request: every process has its connections by then
_NICENESS = -10
T = TypeVar("T")


class Generators:
    """Some processes, each with its share of a lap."""

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin)

    def __enter__(self) -> Self:
        list(self._pool.map(_nothing, range(self._count)))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def closed(
        self, lanes: Sequence[Lane], *, settle_s: float, seconds: float, stop: Path | None = None
    ) -> Callable[[], CallersLap]:
        """Begins a lap; what is returned waits for it. Lanes keep their numbers. stop: a file that ends it early."""
        begin_s = time.monotonic() + START_S
        numbered = list(enumerate(lanes))
        parts = [part for number in range(self._count) if (part := numbered[number :: self._count])]
        running = [self._pool.submit(run_callers, part, begin_s, settle_s, seconds, stop) for part in parts]
        return lambda: _one_of_callers(_results(running))

    def opened(self, schedule: Schedule) -> Callable[[], ScheduleLap]:
        """Begins a schedule, its moments dealt out; what is returned waits for it."""
        begin_s = time.monotonic() + START_S
        parts = [_part(schedule, number, self._count) for number in range(self._count)]
        running = [self._pool.submit(run_schedule, part, begin_s) for part in parts]
        return lambda: _one_of_schedules(_results(running))


def _results(running: Sequence["Future[T]"]) -> list[T]:
    return [future.result() for future in running]


def _part(schedule: Schedule, number: int, count: int) -> Schedule:
    moments = schedule.moments_s[number::count]
    connections = max(1, schedule.connections // count)
    return Schedule(schedule.port, schedule.requests, moments, connections, schedule.timeout_s)


def _one_of_callers(laps: Sequence[CallersLap]) -> CallersLap:
    asks = [ask for lap in laps for ask in lap.asks]
    return CallersLap(asks, max(lap.seconds for lap in laps), sum(lap.cpu_s for lap in laps))


def _one_of_schedules(laps: Sequence[ScheduleLap]) -> ScheduleLap:
    failures: Counter[str] = Counter()
    for lap in laps:
        failures.update(lap.failures)
    return ScheduleLap(
        list(itertools.chain.from_iterable(lap.latencies_ms for lap in laps)),
        list(itertools.chain.from_iterable(lap.late_ms for lap in laps)),
        dict(failures),
        sum(lap.unsent for lap in laps),
        sum(lap.cpu_s for lap in laps),
    )


def _nothing(number: int) -> int:
    return number


def _begin() -> None:
    """Before others, where this user may say so: a generator that waits for a core measures itself. Ctrl-C, which the
    terminal sends to all, is the bench's own matter.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
