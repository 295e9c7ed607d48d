"""How each figure of one round comes about; None where the round does not hold it."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.results import PhaseResult, Reload, RequestSummary, Second

WARM_UP_SHARE = 0.2
SHORTEST_SLOPE_S = 60.0
SHORTEST_DRIFT_S = 9

Figure = Callable[["RoundPhases"], float | None]


@dataclass(frozen=True, slots=True)
class RoundPhases:
    """One round's phases by what they are for, and its reloads of the target's model."""

    judged: tuple[PhaseResult, ...]
    judged_beside: tuple[PhaseResult, ...]
    capacity: tuple[PhaseResult, ...]
    capacity_beside: tuple[PhaseResult, ...]
    reloads: tuple[Reload, ...]


def per_second(count: Callable[[PhaseResult], int]) -> Figure:
    """What is counted in the judged phases, a second of them."""
    return lambda of: _per_second(of.judged, count)


def share_of_intended(count: Callable[[RequestSummary], int]) -> Figure:
    """What is counted in the judged phases, as a share of their intended requests."""

    def figure(of: RoundPhases) -> float | None:
        intended = sum(phase.all.intended for phase in of.judged)
        return sum(count(phase.all) for phase in of.judged) / intended if intended else None

    return figure


def worst_percentile(field: str) -> Figure:
    """The highest of the judged phases' percentiles of that name."""

    def figure(of: RoundPhases) -> float | None:
        return max((getattr(phase.all.latency, field) for phase in of.judged if phase.all.latency.count), default=None)

    return figure


def capacity(phases: Sequence[PhaseResult]) -> float | None:
    """Right answers a second of phases that measure capacity; None without any."""
    return _per_second(phases, lambda phase: phase.all.ok)


def capacity_of_target(of: RoundPhases) -> float | None:
    """The target's capacity."""
    return capacity(of.capacity)


def goodput_of_capacity(of: RoundPhases) -> float | None:
    """Goodput of the judged phases against the capacity."""
    return _ratio(_per_second(of.judged, lambda phase: phase.all.good), capacity(of.capacity))


def rate_ratio(of: RoundPhases) -> float | None:
    """The target's capacity against the other side's."""
    return _ratio(capacity(of.capacity), capacity(of.capacity_beside))


def refusal_p99_ms(of: RoundPhases) -> float | None:
    """The slowest judged phase's p99 of refusals."""
    return max((phase.all.refusals.p99 for phase in of.judged if phase.all.refusals.count), default=None)


def cpu_ms_per_ok(of: RoundPhases) -> float | None:
    """CPU for a right answer over all judged phases; None where it could not be read in each of them."""
    costs = [(phase.cpu_ms_per_ok, phase.all.ok) for phase in of.judged if phase.all.ok]
    answers = sum(ok for _, ok in costs)
    known = [cost * ok for cost, ok in costs if cost is not None]
    return sum(known) / answers if answers and len(known) == len(costs) else None


def added_latency(field: str) -> Figure:
    """The most that a judged phase's percentile is above the same phase's of the other side."""

    def figure(of: RoundPhases) -> float | None:
        beside = {phase.phase: phase.all.latency for phase in of.judged_beside if phase.all.latency.count}
        pairs = [(phase.all.latency, beside[phase.phase]) for phase in of.judged if phase.phase in beside]
        return max((getattr(a, field) - getattr(b, field) for a, b in pairs if a.count), default=None)

    return figure


def median_reload(pick: Callable[[Reload], float]) -> Figure:
    """The median of the round's reloads."""
    return lambda of: statistics.median(map(pick, of.reloads)) if of.reloads else None


def batch_size_mean(of: RoundPhases) -> float | None:
    """Rows of a batch over the judged phases: answers / batches."""
    sizes = [pair for phase in of.judged for pair in phase.all.batch_sizes]
    batches = sum(answers / rows for rows, answers in sizes)
    return sum(answers for _, answers in sizes) / batches if batches else None


def rss_slope_mib_per_min(of: RoundPhases) -> float | None:
    """The steepest growth of memory in a judged phase that is long enough to tell."""
    return max((slope for phase in of.judged if (slope := _rss_slope(phase.timeline)) is not None), default=None)


def p99_drift(of: RoundPhases) -> float | None:
    """The largest drift of a judged phase that is long enough to tell."""
    return max((drift for phase in of.judged if (drift := _drift(phase.timeline)) is not None), default=None)


def _per_second(phases: Sequence[PhaseResult], count: Callable[[PhaseResult], int]) -> float | None:
    seconds = sum(phase.seconds for phase in phases)
    return sum(count(phase) for phase in phases) / seconds if seconds > 0 else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _rss_slope(timeline: Sequence[Second]) -> float | None:
    after_warm_up = timeline[int(len(timeline) * WARM_UP_SHARE) :]
    known = [(second.at_s, second.rss_mib) for second in after_warm_up if second.rss_mib is not None]
    if len(known) < 2 or known[-1][0] - known[0][0] < SHORTEST_SLOPE_S - 1:
        return None
    at_s, rss_mib = np.array(known).T
    centred_s = at_s - at_s.mean()
    return float(centred_s @ (rss_mib - rss_mib.mean()) / (centred_s @ centred_s)) * 60.0


def _drift(timeline: Sequence[Second]) -> float | None:
    p99_ms = [second.p99_ms for second in timeline if second.p99_ms > 0]
    if len(p99_ms) < SHORTEST_DRIFT_S:
        return None
    third = len(p99_ms) // 3
    return statistics.median(p99_ms[-third:]) / statistics.median(p99_ms[:third]) - 1
