"""Answered and slow against offered: the points of the throughput plot, from every open loop of a run."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.knee import SERVED_SHARE, Outcome, find_knee
from loadtest.report.rounds import PhaseRounds, phase_rounds, searched_knee
from loadtest.results import PhaseResult, Run, Second, Side

GROUPS = 12
WINDOW_S = 5
_VARIES_BY = 0.25  # of the mean, beyond what chance alone does


@dataclass(frozen=True, slots=True)
class OfferedPoint:
    """What came of one offered rate. p99_ms: None where nothing was answered. seconds: how long it was offered.

    is_usable: False where the generator was the bottleneck, so that it says nothing of the server.
    """

    offered_per_s: float
    ok_per_s: float
    p99_ms: float | None
    seconds: float
    is_usable: bool = True

    def outcome(self, slo_p99_ms: float) -> Outcome:
        """Whether it kept the SLO: its p99, and 99 of 100 requests answered."""
        if not self.is_usable:
            return Outcome.UNUSABLE
        is_served = self.ok_per_s >= SERVED_SHARE * self.offered_per_s
        is_kept = is_served and self.p99_ms is not None and self.p99_ms <= slo_p99_ms
        return Outcome.KEPT if is_kept else Outcome.BROKEN


def offered_points(run: Run, side: Side) -> tuple[OfferedPoint, ...]:
    """A point a round of a phase with one rate, a point a group of seconds where the rate changes; lowest first."""
    points: list[OfferedPoint] = []
    for phase in phase_rounds(run):
        if phase.side is side and phase.first.is_open_loop:
            points += _points(phase)
    return tuple(sorted(points, key=lambda point: (point.offered_per_s, point.ok_per_s)))


def has_a_curve(points: Sequence[OfferedPoint]) -> bool:
    """Whether at least two rates were offered: one in another's shadow (within 10 %) is the same."""
    rates = [point.offered_per_s for point in points if point.offered_per_s > 0]
    return bool(rates) and max(rates) > 1.1 * min(rates)


def knee_of(run: Run) -> float | None:
    """The highest offered rate that keeps the SLO: what a search found, else by the curve; None where none does."""
    searched = searched_knee(run)
    if searched is not None:
        return searched
    points = [point for point in offered_points(run, Side.TARGET) if point.is_usable]
    return find_knee([(it.offered_per_s, it.ok_per_s, _or_infinite(it.p99_ms)) for it in points], run.slo_p99_ms)


def _or_infinite(p99_ms: float | None) -> float:
    return math.inf if p99_ms is None else p99_ms


def _points(phase: PhaseRounds) -> list[OfferedPoint]:
    if any(_varies(result) for result in phase.rounds):
        return _points_of_seconds([second for result in phase.rounds for second in _whole_seconds(result)])
    return [_point_of_phase(result) for result in phase.rounds if result.seconds > 0 and result.all.intended]


def _point_of_phase(result: PhaseResult) -> OfferedPoint:
    p99_ms = result.all.latency.p99 if result.all.latency.count else None
    return OfferedPoint(result.offered_per_s, result.ok_per_s, p99_ms, result.seconds, not result.health.complaint)


def _varies(result: PhaseResult) -> bool:
    """Whether the schedule itself changes its rate: chance (Poisson) evens out over a few seconds."""
    offered = [second.offered for second in _whole_seconds(result)]
    windows = [statistics.fmean(offered[at : at + WINDOW_S]) for at in range(0, len(offered), WINDOW_S)]
    if len(offered) < 2 or not sum(offered):
        return False
    mean = statistics.fmean(offered)
    return _exceeds_chance(windows, mean, WINDOW_S) or _exceeds_chance(offered, mean, 1)


def _exceeds_chance(counts: Sequence[float], mean: float, seconds: int) -> bool:
    chance = math.sqrt(mean / seconds)
    return statistics.pstdev(counts) > max(_VARIES_BY * mean, 2 * chance)


def _whole_seconds(result: PhaseResult) -> Iterable[Second]:
    """The seconds that lie in the schedule with all their length: the last may be a piece."""
    ends_s = result.began_s + result.seconds + 1e-6
    return [second for second in result.timeline if second.at_s + 1 <= ends_s]


def _points_of_seconds(seconds: Sequence[Second]) -> list[OfferedPoint]:
    """Seconds of about the same offered rate are one point; its p99 is the median of their p99s."""
    highest = max(second.offered for second in seconds)
    groups: dict[int, list[Second]] = {}
    for second in seconds:
        groups.setdefault(math.ceil(GROUPS * second.offered / highest), []).append(second)
    return [_point_of_group(group) for place, group in sorted(groups.items()) if place]


def _point_of_group(group: Sequence[Second]) -> OfferedPoint:
    answered = [second.p99_ms for second in group if second.p99_ms > 0]
    return OfferedPoint(
        statistics.fmean(second.offered for second in group),
        statistics.fmean(second.ok for second in group),
        statistics.median(answered) if answered else None,
        float(len(group)),
    )
