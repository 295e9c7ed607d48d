"""A run's seconds as series for plots: as many points as a plot can show, and a gap between phases."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadtest.results import PhaseResult, Run, Second, Side

MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class Stretch:
    """A phase's place on the time axis, in seconds since the run's start; both sides of a phase are one stretch."""

    phase: str
    round: int
    began_s: float
    ends_s: float


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one side over time. Every list is as long as at_s; NaN is a gap.

    p50_ms is the mean of a point's seconds, p99_ms the highest; rates and loads are means.
    """

    at_s: list[float]
    offered: list[float]
    ok: list[float]
    bad: list[float]
    p50_ms: list[float]
    p99_ms: list[float]
    server_cpu: list[float]
    machine_cpu: list[float]
    gpu: list[float]
    gpu_sm: list[float]
    rss_mib: list[float]


def seconds_a_point(run: Run) -> int:
    """How many seconds a point of the plots stands for, so that a side has about MOST_POINTS."""
    longest = max((sum(len(result.timeline) for result in _of(run, side)) for side in Side), default=0)
    return max(1, math.ceil(longest / MOST_POINTS))


def stretches(run: Run) -> tuple[Stretch, ...]:
    """Where each phase lies, in the order of time."""
    found: list[Stretch] = []
    for result in sorted(run.phases, key=lambda result: result.began_s):
        if not result.timeline:
            continue
        ends_s = result.began_s + max(result.seconds, len(result.timeline))
        stretch = Stretch(result.phase, result.round, result.began_s, ends_s)
        if found and (found[-1].phase, found[-1].round) == (stretch.phase, stretch.round):
            stretch = replace(found.pop(), ends_s=ends_s)
        found.append(stretch)
    return tuple(found)


def series_of(run: Run, side: Side) -> Series:
    """The side's seconds of every phase, thinned out for a plot."""
    width = seconds_a_point(run)
    points: list[tuple[float, Sequence[Second]]] = []
    for result in sorted(_of(run, side), key=lambda result: result.began_s):
        seconds = result.timeline
        points += [(chunk[0].at_s + len(chunk) / 2, chunk) for chunk in _chunks(seconds, width)]
        points.append((result.began_s + result.seconds, ()))
    return _series(points)


def _of(run: Run, side: Side) -> list[PhaseResult]:
    return [result for result in run.phases if result.side is side and result.timeline]


def _chunks(seconds: Sequence[Second], width: int) -> list[Sequence[Second]]:
    return [seconds[at : at + width] for at in range(0, len(seconds), width)]


def _series(points: Sequence[tuple[float, Sequence[Second]]]) -> Series:
    chunks = [chunk for _, chunk in points]
    return Series(
        at_s=[at_s for at_s, _ in points],
        offered=[_mean(chunk, lambda second: second.offered) for chunk in chunks],
        ok=[_mean(chunk, lambda second: second.ok) for chunk in chunks],
        bad=[_mean(chunk, lambda second: second.bad) for chunk in chunks],
        p50_ms=[_mean(chunk, lambda second: second.p50_ms or None) for chunk in chunks],
        p99_ms=[max((second.p99_ms for second in chunk if second.p99_ms), default=math.nan) for chunk in chunks],
        server_cpu=[_mean(chunk, lambda second: second.server_cpu) for chunk in chunks],
        machine_cpu=[_mean(chunk, lambda second: second.machine_cpu) for chunk in chunks],
        gpu=[_mean(chunk, lambda second: second.gpu) for chunk in chunks],
        gpu_sm=[_mean(chunk, lambda second: second.gpu_sm) for chunk in chunks],
        rss_mib=[_mean(chunk, lambda second: second.rss_mib) for chunk in chunks],
    )


def _mean(chunk: Sequence[Second], figure: Callable[[Second], float | None]) -> float:
    values = [value for second in chunk if (value := figure(second)) is not None]
    return sum(values) / len(values) if values else math.nan
