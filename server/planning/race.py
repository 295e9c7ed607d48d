"""The race: every policy, tuned, before the same engine and the same arrivals, beside what is possible at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from server.planning import bounds
from server.planning.arrivals import PATTERNS, Arrivals
from server.planning.clairvoyant import fewest_lost
from server.planning.contenders import Contender, Problem, Setting, settings_of
from server.planning.search import Effort, Rate, highest, over_seeds
from server.planning.simulate import Outcome, simulate

TUNING_SEEDS = (101, 102, 103)  # others than those that decide
POSSIBLE_SEEDS = 3  # it varies less than what the policies reach, and is dear
TUNING_SHARE = 0.4  # of the arrivals that decide


@dataclass(frozen=True, slots=True)
class Case:
    """One race: the engine and SLO, the arrivals' pattern by name, the share that must be inside the SLO."""

    problem: Problem
    pattern: str
    share: float = 0.99
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True, slots=True)
class Load:
    """How a policy fared at a rate. Rates in requests a second, shares of what was offered."""

    offered_per_s: float
    goodput_per_s: float
    within: float
    late: float
    refused: float
    expired: float
    mean_batch: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One contender's result. settings: how many were tried; words: the best one. overload: by multiple of capacity."""

    contender: Contender
    words: str
    settings: int
    rate: Rate
    at_rate: Load
    overload: tuple[tuple[float, Load], ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Requests a second. nexus: 2 t(b) <= SLO; even: evenly spaced arrivals; capacity: t(b) <= SLO.

    possible: the rate at which even a scheduler that knows all arrivals answers the share; None for several instances.
    """

    nexus: float
    even: float
    capacity: float
    possible: Rate | None


def bounds_of(case: Case) -> Bounds:
    """What limits every contender."""
    engine, slo_s = case.problem.engine, case.problem.slo_s
    profile, instances = engine.profile, engine.instances
    return Bounds(
        nexus=bounds.nexus_rate(profile, slo_s, instances=instances),
        even=bounds.even_rate(profile, slo_s, instances=instances),
        capacity=bounds.capacity(profile, slo_s, instances=instances),
        possible=_possible(case) if instances == 1 else None,
    )


def run(case: Case, contender: Contender, multiples: Sequence[float] = ()) -> Row:
    """The contender's highest rate with its best setting, and how it fares at multiples of Nexus' bound."""
    settings = settings_of(contender, case.problem)
    best = settings[0] if len(settings) == 1 else tune(case, settings)
    rate = over_seeds([_rate(case, best, (seed,)) for seed in case.effort.seeds])
    base = bounds.nexus_rate(case.problem.engine.profile, case.problem.slo_s, instances=case.problem.engine.instances)
    overload = tuple((multiple, load(case, best, multiple * base)) for multiple in multiples)
    return Row(contender, best.words, len(settings), rate, load(case, best, rate.per_s), overload)


def tune(case: Case, settings: Sequence[Setting]) -> Setting:
    """The setting with the highest rate over seeds of its own; one that cannot beat the best so far costs one look."""
    effort, part = case.effort, TUNING_SHARE
    effort = replace(effort, count=int(effort.count * part), span_s=effort.span_s * part)
    case, best, best_rate = replace(case, effort=effort), settings[0], 0.0
    for setting in settings:
        rate = _rate(case, setting, TUNING_SEEDS, floor=best_rate * (1 + case.effort.resolution))
        if rate > best_rate:
            best, best_rate = setting, rate
    return best


def load(case: Case, setting: Setting, rate: float) -> Load:
    """At that rate, over all seeds together."""
    outcomes = [
        _replay(case, setting, case.effort.arrivals(PATTERNS[case.pattern], rate, s)) for s in case.effort.seeds
    ]
    offered = max(sum(one.offered for one in outcomes), 1)
    calls = max(sum(sum(one.batch_rows.values()) for one in outcomes), 1)
    latencies = sorted(took for one in outcomes for took in one.latencies_s) or [0.0]
    return Load(
        offered_per_s=rate,
        goodput_per_s=sum(one.goodput for one in outcomes) / len(outcomes),
        within=sum(one.within_slo for one in outcomes) / offered,
        late=sum(one.late for one in outcomes) / offered,
        refused=sum(one.refused for one in outcomes) / offered,
        expired=sum(one.expired for one in outcomes) / offered,
        mean_batch=sum(rows * times for one in outcomes for rows, times in one.batch_rows.items()) / calls,
        p50_s=latencies[len(latencies) // 2],
        p99_s=latencies[int(len(latencies) * 0.99)],
    )


def _rate(case: Case, setting: Setting, seeds: Sequence[int], *, floor: float = 0.0) -> float:
    def holds(arrivals: Arrivals) -> bool:
        most = int(len(arrivals) * (1 - case.share))
        outcome = _replay(case, setting, arrivals, lost_at_most=most)
        return not outcome.is_cut_short and outcome.share >= case.share

    return _highest(case, holds, seeds, floor=floor)


def _possible(case: Case) -> Rate:
    def holds(arrivals: Arrivals) -> bool:
        most = int(len(arrivals) * (1 - case.share))
        return fewest_lost(arrivals.times, case.problem.engine.profile, case.problem.slo_s, at_most=most) is not None

    return over_seeds([_highest(case, holds, (seed,)) for seed in case.effort.seeds[:POSSIBLE_SEEDS]])


def _highest(case: Case, holds: Callable[[Arrivals], bool], seeds: Sequence[int], *, floor: float = 0.0) -> float:
    pattern, effort, engine = PATTERNS[case.pattern], case.effort, case.problem.engine
    top = bounds.capacity(engine.profile, case.problem.slo_s, instances=engine.instances)
    return highest(
        lambda rate: all(holds(effort.arrivals(pattern, rate, seed)) for seed in seeds),
        top=top,
        resolution=effort.resolution,
        floor=floor,
    )


def _replay(case: Case, setting: Setting, arrivals: Arrivals, *, lost_at_most: int | None = None) -> Outcome:
    return simulate(setting.make(), case.problem.engine, arrivals, slo_s=case.problem.slo_s, lost_at_most=lost_at_most)
