"""The measures that a target can name, and how each is computed."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock_load.results import Measurement, PhaseResult, Reload, RequestSummary, Second, Side, Spread

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
    """CPU for a right answer over all judged phases; None if it could not be read in each of them."""
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


class Measure(msgspec.Struct, frozen=True):
    """A name that targets.toml may use. meaning: for a person; origin: how the figure of one round comes about."""

    name: str
    unit: str
    meaning: str
    origin: str


@dataclass(frozen=True, slots=True)
class _Rule:
    measure: Measure
    figure: Callable[[RoundPhases], float | None]


def _rule(name: str, unit: str, figure: Callable[[RoundPhases], float | None], *, meaning: str, origin: str) -> _Rule:
    return _Rule(Measure(name, unit, meaning, origin), figure)


def _percentile(name: str, field: str, share: str) -> _Rule:
    return _rule(
        name,
        "ms",
        worst_percentile(field),
        meaning=f"latency that {share} of the requests kept, from the intended moment of sending",
        origin="nearest rank over answers and timeouts",
    )


_KNEE = Measure(
    "knee_per_s",
    "/s",
    "highest offered rate that kept the SLO",
    "a search of rates, each confirmed in a longer trial (penstock load knee)",
)

_RULES = (
    _rule(
        "ok_per_s",
        "/s",
        per_second(lambda phase: phase.all.ok),
        meaning="right answers a second, late ones too",
        origin="right answers / seconds of the judged phases",
    ),
    _rule(
        "good_per_s",
        "/s",
        per_second(lambda phase: phase.all.good),
        meaning="right answers within the SLO a second: goodput",
        origin="right answers in time / seconds of the judged phases",
    ),
    _rule(
        "offered_per_s",
        "/s",
        per_second(lambda phase: phase.all.intended),
        meaning="requests a second that the schedule asked for",
        origin="intended requests / seconds of the judged phases",
    ),
    _rule(
        "error_share",
        "share",
        share_of_intended(lambda of: of.refused + of.failed + of.timeouts + of.not_sent),
        meaning="requests that got no right answer, whatever the reason",
        origin="(refused + failed + timeouts + not sent) / intended",
    ),
    _rule(
        "failure_share",
        "share",
        share_of_intended(lambda of: of.failed + of.timeouts),
        meaning="requests that broke; an honest refusal is none",
        origin="(failed + timeouts) / intended",
    ),
    _percentile("p50_ms", "p50", "half"),
    _percentile("p90_ms", "p90", "90 %"),
    _percentile("p95_ms", "p95", "95 %"),
    _percentile("p99_ms", "p99", "99 %"),
    _percentile("p999_ms", "p999", "99.9 %"),
    _rule(
        "capacity_per_s",
        "/s",
        capacity_of_target,
        meaning="right answers a second in a closed loop: each client sends its next request after the answer",
        origin="right answers / seconds of the phases that measure capacity",
    ),
    _rule(
        "goodput_of_capacity",
        "share",
        goodput_of_capacity,
        meaning="what is left of the capacity, within the SLO, under the judged load",
        origin="good_per_s / capacity_per_s of the same round",
    ),
    _rule(
        "refusal_p99_ms",
        "ms",
        refusal_p99_ms,
        meaning="how long 99 % of the refused waited for their refusal",
        origin="nearest rank over refusals, from the intended moment of sending",
    ),
    _rule(
        "cpu_ms_per_ok",
        "ms",
        cpu_ms_per_ok,
        meaning="CPU time of the server's processes for a right answer",
        origin="CPU time over the judged phases / right answers",
    ),
    _rule(
        "rss_slope_mib_per_min",
        "MiB/min",
        rss_slope_mib_per_min,
        meaning="growth of the server's resident memory",
        origin="least squares over the seconds after the first fifth, where those are a minute at least",
    ),
    _rule(
        "p99_drift",
        "share",
        p99_drift,
        meaning="how much slower a judged phase ended than it began: 0.1 is 10 % slower",
        origin="median of the seconds' p99 in the last third / in the first third - 1",
    ),
    _rule(
        "rate_ratio",
        "ratio",
        rate_ratio,
        meaning="capacity against that of the other side, measured in the same run",
        origin="capacity_per_s of the target / of the other side, same round",
    ),
    _rule(
        "added_p50_ms",
        "ms",
        added_latency("p50"),
        meaning="median latency beyond that of the other side",
        origin="p50 of the target - p50 of the other side, same phase and round",
    ),
    _rule(
        "added_p99_ms",
        "ms",
        added_latency("p99"),
        meaning="p99 beyond that of the other side",
        origin="p99 of the target - p99 of the other side, same phase and round",
    ),
    _rule(
        "load_ms",
        "ms",
        median_reload(lambda reload: reload.load_ms),
        meaning="from the call that loads a model until it is ready",
        origin="median of the round's reloads",
    ),
    _rule(
        "first_answer_ms",
        "ms",
        median_reload(lambda reload: reload.first_answer_ms),
        meaning="the first answer of a model that was just loaded",
        origin="median of the round's reloads",
    ),
    _rule(
        "batch_size_mean",
        "rows",
        batch_size_mean,
        meaning="rows of a batch that the server ran, by its answers' own word",
        origin="answers / batches, where an answer from a batch of n counts as 1/n of a batch",
    ),
)

MEASURES: tuple[Measure, ...] = (*(rule.measure for rule in _RULES), _KNEE)
UNITS = {measure.name: measure.unit for measure in MEASURES}


def measure(phases: Sequence[PhaseResult], reloads: Sequence[Reload] = ()) -> tuple[Measurement, ...]:
    """Every figure of MEASURES that these phases and reloads hold, over the rounds; what was not measured is absent.

    Measurement.rounds says how many rounds had the figure.
    """
    rounds = [_round_phases(number, phases, reloads) for number in _round_numbers(phases, reloads)]
    found: list[Measurement] = []
    for rule in _RULES:
        values = [value for each in rounds if (value := rule.figure(each)) is not None]
        if values:
            found.append(_measurement(rule.measure, values))
    return tuple(found)


def knee_measurement(rates_per_s: Sequence[float]) -> Measurement:
    """The knee as a figure that targets speak of: a rate a round; there is one at least."""
    return _measurement(_KNEE, rates_per_s)


def capacity_per_s(phases: Iterable[PhaseResult], *, round: int, side: Side) -> float | None:
    """The capacity of one side in one round, which shares of the capacity mean; None: no phase measured it."""
    return capacity([it for it in phases if it.is_capacity and it.round == round and it.side is side])


def measurement_of(name: str, unit: str, values: Sequence[float]) -> Measurement:
    """A figure by its values, one a round; there is one at least."""
    spread = Spread(median=statistics.median(values), low=min(values), high=max(values))
    return Measurement(name, unit, spread, rounds=len(values))


def _measurement(of: Measure, values: Sequence[float]) -> Measurement:
    return measurement_of(of.name, of.unit, values)


def _round_numbers(phases: Iterable[PhaseResult], reloads: Iterable[Reload]) -> list[int]:
    return sorted({phase.round for phase in phases} | {reload.round for reload in reloads})


def _round_phases(number: int, phases: Iterable[PhaseResult], reloads: Iterable[Reload]) -> RoundPhases:
    here = [phase for phase in phases if phase.round == number]

    def of(side: Side, is_wanted: Callable[[PhaseResult], bool]) -> tuple[PhaseResult, ...]:
        return tuple(phase for phase in here if phase.side is side and is_wanted(phase))

    return RoundPhases(
        judged=of(Side.TARGET, lambda phase: phase.is_judged),
        judged_beside=of(Side.BESIDE, lambda phase: phase.is_judged),
        capacity=of(Side.TARGET, lambda phase: phase.is_capacity),
        capacity_beside=of(Side.BESIDE, lambda phase: phase.is_capacity),
        reloads=tuple(it for it in reloads if it.round == number and it.side is Side.TARGET),
    )
