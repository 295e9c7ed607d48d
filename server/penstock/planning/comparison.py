"""Compares tuned policies on the same engine and arrivals: highest rate, overload, bounds."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from penstock.planning import bounds
from penstock.planning.bounds import fewest_lost
from penstock.planning.policies import Contender, PolicyProblem, PolicySetting, settings_of
from penstock.planning.simulation import PATTERNS, Arrivals, Pattern, SimulationResult, simulate

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # two-sided, for 1, 2, … degrees of freedom


@dataclass(frozen=True, slots=True)
class Effort:
    """Effort of a search. count, span_s: minimum arrivals and seconds of a probe. resolution: relative to the rate."""

    count: int = 20_000
    span_s: float = 0.0
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    resolution: float = 0.005

    def arrivals(self, pattern: Pattern, rate: float, seed: int) -> Arrivals:
        """Arrivals at that rate."""
        return pattern(rate, max(self.count, int(rate * self.span_s)), seed)


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests per second, mean over seeds. plus_minus: half of the 95 % confidence interval by Student's t."""

    per_s: float
    plus_minus: float
    by_seed: tuple[float, ...]


def highest(holds: Callable[[float], bool], *, top: float, resolution: float, floor: float = 0.0) -> float:
    """The highest rate up to top for which holds() is true, by bisection; 0 if holds() is false at a floor above 0."""
    if floor > 0.0 and not holds(floor):
        return 0.0
    low, high = floor, top
    while high - low > resolution * high and high > top * resolution:
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def over_seeds(rates: Sequence[float]) -> Rate:
    """Mean over seeds with its confidence interval, which is infinite for one seed."""
    degrees = len(rates) - 1
    if not degrees:
        return Rate(rates[0], float("inf"), tuple(rates))
    spread = statistics.stdev(rates) / len(rates) ** 0.5
    factor = STUDENT_95[min(degrees, len(STUDENT_95)) - 1]
    return Rate(statistics.fmean(rates), factor * spread, tuple(rates))


TUNING_SEEDS = (101, 102, 103)  # different from the seeds of the final measurement
POSSIBLE_SEEDS = 3  # it varies less than the policies' results, and is expensive
TUNING_SHARE = 0.4  # of the arrivals of the final measurement


@dataclass(frozen=True, slots=True)
class RaceCase:
    """One race: engine and SLO, the arrivals' pattern by name, and the share that must be inside the SLO."""

    problem: PolicyProblem
    pattern: str
    share: float = 0.99
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A policy's result at one rate; offered, goodput: requests per second. Shares are of the offered requests."""

    offered: float
    goodput: float
    within: float
    late: float
    refused: float
    expired: float
    mean_batch: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class ContenderResult:
    """One contender's result. settings: number tried. label: the best one. overload: by multiple of capacity."""

    contender: Contender
    label: str
    settings: int
    rate: Rate
    at_rate: LoadResult
    overload: tuple[tuple[float, LoadResult], ...]


@dataclass(frozen=True, slots=True)
class RateBounds:
    """Requests per second. nexus: 2 t(b) <= SLO; even: evenly spaced arrivals; capacity: t(b) <= SLO."""

    nexus: float
    even: float
    capacity: float
    possible: Rate | None  # of a scheduler that knows all arrivals; None for several instances


def bounds_of(case: RaceCase) -> RateBounds:
    """Bounds for all contenders."""
    engine, slo_s = case.problem.engine, case.problem.slo_s
    profile, instances = engine.profile, engine.instances
    return RateBounds(
        nexus=bounds.nexus_rate(profile, slo_s, instances=instances),
        even=bounds.even_rate(profile, slo_s, instances=instances),
        capacity=bounds.capacity(profile, slo_s, instances=instances),
        possible=_possible(case) if instances == 1 else None,
    )


def run_contender(case: RaceCase, contender: Contender, multiples: Sequence[float] = ()) -> ContenderResult:
    """The contender's highest rate with its best setting, and its results at multiples of Nexus' bound."""
    settings = settings_of(contender, case.problem)
    best = settings[0] if len(settings) == 1 else tune_setting(case, settings)
    rate = over_seeds([_rate(case, best, (seed,)) for seed in case.effort.seeds])
    base = bounds.nexus_rate(case.problem.engine.profile, case.problem.slo_s, instances=case.problem.engine.instances)
    overload = tuple((multiple, measure_load(case, best, multiple * base)) for multiple in multiples)
    return ContenderResult(contender, best.label, len(settings), rate, measure_load(case, best, rate.per_s), overload)


def tune_setting(case: RaceCase, settings: Sequence[PolicySetting]) -> PolicySetting:
    """The setting with the highest rate over TUNING_SEEDS. One that cannot beat the best so far costs one probe."""
    effort, part = case.effort, TUNING_SHARE
    effort = replace(effort, count=int(effort.count * part), span_s=effort.span_s * part)
    case, best, best_rate = replace(case, effort=effort), settings[0], 0.0
    for setting in settings:
        rate = _rate(case, setting, TUNING_SEEDS, floor=best_rate * (1 + case.effort.resolution))
        if rate > best_rate:
            best, best_rate = setting, rate
    return best


def measure_load(case: RaceCase, setting: PolicySetting, rate: float) -> LoadResult:
    """Result at that rate over all seeds."""
    outcomes = [
        _replay(case, setting, case.effort.arrivals(PATTERNS[case.pattern], rate, s)) for s in case.effort.seeds
    ]
    offered = max(sum(one.offered for one in outcomes), 1)
    calls = max(sum(sum(one.batch_rows.values()) for one in outcomes), 1)
    latencies = sorted(took for one in outcomes for took in one.latencies_s) or [0.0]
    return LoadResult(
        offered=rate,
        goodput=sum(one.goodput for one in outcomes) / len(outcomes),
        within=sum(one.within_slo for one in outcomes) / offered,
        late=sum(one.late for one in outcomes) / offered,
        refused=sum(one.refused for one in outcomes) / offered,
        expired=sum(one.expired for one in outcomes) / offered,
        mean_batch=sum(rows * times for one in outcomes for rows, times in one.batch_rows.items()) / calls,
        p50_ms=latencies[len(latencies) // 2] * 1e3,
        p99_ms=latencies[int(len(latencies) * 0.99)] * 1e3,
    )


def _rate(case: RaceCase, setting: PolicySetting, seeds: Sequence[int], *, floor: float = 0.0) -> float:
    def holds(arrivals: Arrivals) -> bool:
        most = int(len(arrivals) * (1 - case.share))
        outcome = _replay(case, setting, arrivals, lost_at_most=most)
        return not outcome.is_cut_short and outcome.share >= case.share

    return _highest(case, holds, seeds, floor=floor)


def _possible(case: RaceCase) -> Rate:
    def holds(arrivals: Arrivals) -> bool:
        most = int(len(arrivals) * (1 - case.share))
        return fewest_lost(arrivals.times, case.problem.engine.profile, case.problem.slo_s, at_most=most) is not None

    return over_seeds([_highest(case, holds, (seed,)) for seed in case.effort.seeds[:POSSIBLE_SEEDS]])


def _highest(case: RaceCase, holds: Callable[[Arrivals], bool], seeds: Sequence[int], *, floor: float = 0.0) -> float:
    pattern, effort, engine = PATTERNS[case.pattern], case.effort, case.problem.engine
    top = bounds.capacity(engine.profile, case.problem.slo_s, instances=engine.instances)
    return highest(
        lambda rate: all(holds(effort.arrivals(pattern, rate, seed)) for seed in seeds),
        top=top,
        resolution=effort.resolution,
        floor=floor,
    )


def _replay(
    case: RaceCase, setting: PolicySetting, arrivals: Arrivals, *, lost_at_most: int | None = None
) -> SimulationResult:
    return simulate(setting.make(), case.problem.engine, arrivals, slo_s=case.problem.slo_s, lost_at_most=lost_at_most)


@dataclass(frozen=True, slots=True)
class PlanPiece:
    """Work for one process: a contender's row of a case, or the case's bounds (contender is None)."""

    number: int  # index of the case
    case: RaceCase
    contender: Contender | None
    multiples: tuple[float, ...] = ()  # of Nexus' bound, for overload


Result = tuple[int, ContenderResult | RateBounds]  # the case's number, and its result


@dataclass(frozen=True, slots=True)
class Race:
    """A case's result; rows in the contenders' order."""

    case: RaceCase
    bounds: RateBounds
    rows: tuple[ContenderResult, ...]

    @property
    def ours(self) -> ContenderResult | None:
        """The row of our policy, if it was requested."""
        return next((row for row in self.rows if row.contender is Contender.OURS), None)


def pieces_of(
    cases: Sequence[RaceCase], contenders: Sequence[Contender], multiples: Sequence[float]
) -> list[PlanPiece]:
    """All pieces, the longest first."""
    dear = sorted(contenders, key=lambda one: one not in (Contender.CLIPPER, Contender.TRITON, Contender.AIMD))
    return [
        PlanPiece(number, case, who, tuple(multiples)) for who in (*dear, None) for number, case in enumerate(cases)
    ]


def run_piece(piece: PlanPiece) -> Result:
    """The piece's result."""
    if piece.contender is None:
        return piece.number, bounds_of(piece.case)
    return piece.number, run_contender(piece.case, piece.contender, piece.multiples)


def gather_races(cases: Sequence[RaceCase], contenders: Sequence[Contender], results: Iterable[Result]) -> list[Race]:
    """The races, from all their results in any order."""
    rows: dict[tuple[int, Contender], ContenderResult] = {}
    bounds: dict[int, RateBounds] = {}
    for number, found in results:
        if isinstance(found, ContenderResult):
            rows[number, found.contender] = found
        else:
            bounds[number] = found
    return [
        Race(case, bounds[number], tuple(rows[number, who] for who in contenders)) for number, case in enumerate(cases)
    ]


def races_as_json(races: Sequence[Race]) -> dict[str, object]:
    """{"races": [{profile, slo_ms, arrivals, …, bounds, rows}]}: milliseconds, and requests per second."""
    return {"races": [_race(race) for race in races]}


def _race(race: Race) -> dict[str, object]:
    case, engine, possible = race.case, race.case.problem.engine, race.bounds.possible
    return {
        "profile": engine.profile.name,
        "instances": engine.instances,
        "slo_ms": case.problem.slo_s * 1e3,
        "arrivals": case.pattern,
        "share": case.share,
        "requests_at_least": case.effort.count,
        "seeds": list(case.effort.seeds),
        "bounds": {
            **asdict(race.bounds),
            "possible": possible and possible.per_s,
            "possible_plus_minus": possible and possible.plus_minus,
        },
        "rows": [
            {
                "policy": row.contender.value,
                "knobs": row.label,
                "settings_tried": row.settings,
                "rate": row.rate.per_s,
                "plus_minus": row.rate.plus_minus,
                "rate_by_seed": list(row.rate.by_seed),
                "at_rate": asdict(row.at_rate),
                "overload": [{"times": multiple, **asdict(load)} for multiple, load in row.overload],
            }
            for row in race.rows
        ],
    }
