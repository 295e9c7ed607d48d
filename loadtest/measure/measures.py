"""The figures that targets may speak of: what each is called, counts in, means, and how it comes about.

A figure is found for every round by itself; what a target is judged by is the median over the rounds. Figures are of
the target's judged phases, and only comparisons look at the other side. Where a round has several judged phases, counts
are added up before they are divided, and of percentiles and slopes the worst phase's stands.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from loadtest.measure import figures
from loadtest.measure.figures import RoundPhases
from loadtest.results import Measurement, PhaseResult, Reload, Side, Spread


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
        figures.worst_percentile(field),
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
        figures.per_second(lambda phase: phase.all.ok),
        meaning="right answers a second, late ones too",
        origin="right answers / seconds of the judged phases",
    ),
    _rule(
        "good_per_s",
        "/s",
        figures.per_second(lambda phase: phase.all.good),
        meaning="right answers within the SLO a second: goodput",
        origin="right answers in time / seconds of the judged phases",
    ),
    _rule(
        "offered_per_s",
        "/s",
        figures.per_second(lambda phase: phase.all.intended),
        meaning="requests a second that the schedule asked for",
        origin="intended requests / seconds of the judged phases",
    ),
    _rule(
        "error_share",
        "share",
        figures.share_of_intended(lambda of: of.refused + of.failed + of.timeouts + of.not_sent),
        meaning="requests that got no right answer, whatever the reason",
        origin="(refused + failed + timeouts + not sent) / intended",
    ),
    _rule(
        "failure_share",
        "share",
        figures.share_of_intended(lambda of: of.failed + of.timeouts),
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
        figures.capacity_of_target,
        meaning="right answers a second with callers that always wait for the next answer",
        origin="right answers / seconds of the phases that measure capacity",
    ),
    _rule(
        "goodput_of_capacity",
        "share",
        figures.goodput_of_capacity,
        meaning="what is left of the capacity, within the SLO, under the judged load",
        origin="good_per_s / capacity_per_s of the same round",
    ),
    _rule(
        "refusal_p99_ms",
        "ms",
        figures.refusal_p99_ms,
        meaning="how long 99 % of the refused waited for their refusal",
        origin="nearest rank over refusals, from the intended moment of sending",
    ),
    _rule(
        "cpu_ms_per_ok",
        "ms",
        figures.cpu_ms_per_ok,
        meaning="CPU time of the server's processes for a right answer",
        origin="CPU time over the judged phases / right answers",
    ),
    _rule(
        "rss_slope_mib_per_min",
        "MiB/min",
        figures.rss_slope_mib_per_min,
        meaning="growth of the server's resident memory",
        origin="least squares over the seconds after the first fifth, where those are a minute at least",
    ),
    _rule(
        "p99_drift",
        "share",
        figures.p99_drift,
        meaning="how much slower a judged phase ended than it began: 0.1 is 10 % slower",
        origin="median of the seconds' p99 in the last third / in the first third - 1",
    ),
    _rule(
        "rate_ratio",
        "ratio",
        figures.rate_ratio,
        meaning="capacity against that of the other side, measured in the same run",
        origin="capacity_per_s of the target / of the other side, same round",
    ),
    _rule(
        "added_p50_ms",
        "ms",
        figures.added_latency("p50"),
        meaning="median latency beyond that of the other side",
        origin="p50 of the target - p50 of the other side, same phase and round",
    ),
    _rule(
        "added_p99_ms",
        "ms",
        figures.added_latency("p99"),
        meaning="p99 beyond that of the other side",
        origin="p99 of the target - p99 of the other side, same phase and round",
    ),
    _rule(
        "load_ms",
        "ms",
        figures.median_reload(lambda reload: reload.load_ms),
        meaning="from the call that loads a model until it is ready",
        origin="median of the round's reloads",
    ),
    _rule(
        "first_answer_ms",
        "ms",
        figures.median_reload(lambda reload: reload.first_answer_ms),
        meaning="the first answer of a model that was just loaded",
        origin="median of the round's reloads",
    ),
    _rule(
        "batch_size_mean",
        "rows",
        figures.batch_size_mean,
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
    return figures.capacity([it for it in phases if it.is_capacity and it.round == round and it.side is side])


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
