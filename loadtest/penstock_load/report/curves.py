"""Report sections with curves: answered rate and latency against offered rate, and their points."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock_load.report.document import (
    NOTHING,
    Absence,
    Cell,
    PlotName,
    Section,
    Table,
    Tone,
    join,
    number,
    one_line,
    percent,
    plain_number,
)
from penstock_load.report.figures import PHASE_CHARACTERS, phase_name
from penstock_load.report.rounds import (
    MOST_DRAWN,
    PhaseRounds,
    drawn_phases,
    is_knee_search,
    phase_rounds,
    searched_knee,
    seconds_a_point,
)
from penstock_load.results import PhaseResult, Run, Second, Side
from penstock_load.search import SERVED_SHARE, TrialOutcome, find_knee

GROUPS = 12
WINDOW_S = 5
_VARIES_BY = 0.25  # of the mean, beyond what chance alone does


@dataclass(frozen=True, slots=True)
class OfferedPoint:
    """The outcome of one offered rate. p99_ms: None without an answer. seconds: how long it was offered.

    is_usable: False where the generator was the bottleneck, so that it says nothing of the server.
    """

    offered_per_s: float
    ok_per_s: float
    p99_ms: float | None
    seconds: float
    is_usable: bool = True

    def outcome(self, slo_p99_ms: float) -> TrialOutcome:
        """Whether it kept the SLO: its p99, and 99 of 100 requests answered."""
        if not self.is_usable:
            return TrialOutcome.UNUSABLE
        is_served = self.ok_per_s >= SERVED_SHARE * self.offered_per_s
        is_kept = is_served and self.p99_ms is not None and self.p99_ms <= slo_p99_ms
        return TrialOutcome.KEPT if is_kept else TrialOutcome.BROKEN


def offered_points(run: Run, side: Side) -> tuple[OfferedPoint, ...]:
    """A point a round of a phase with one rate, a point a group of seconds where the rate changes; lowest first."""
    points: list[OfferedPoint] = []
    for phase in phase_rounds(run):
        if phase.side is side and phase.first.is_open_loop:
            points += _offered_points(phase)
    return tuple(sorted(points, key=lambda point: (point.offered_per_s, point.ok_per_s)))


def has_a_curve(points: Sequence[OfferedPoint]) -> bool:
    """Whether at least two rates were offered: one in another's shadow (within 10 %) is the same."""
    rates = [point.offered_per_s for point in points if point.offered_per_s > 0]
    return bool(rates) and max(rates) > 1.1 * min(rates)


def knee_of(run: Run) -> float | None:
    """The highest offered rate within the SLO: of a search, else by the curve; None if no rate is."""
    searched = searched_knee(run)
    if searched is not None:
        return searched
    points = [point for point in offered_points(run, Side.TARGET) if point.is_usable]
    return find_knee([(it.offered_per_s, it.ok_per_s, _or_infinite(it.p99_ms)) for it in points], run.slo_p99_ms)


def _or_infinite(p99_ms: float | None) -> float:
    return math.inf if p99_ms is None else p99_ms


def _offered_points(phase: PhaseRounds) -> list[OfferedPoint]:
    if any(rate_varies(result) for result in phase.rounds):
        return _points_of_seconds([second for result in phase.rounds for second in _whole_seconds(result)])
    return [_point_of_phase(result) for result in phase.rounds if result.seconds > 0 and result.all.intended]


def _point_of_phase(result: PhaseResult) -> OfferedPoint:
    p99_ms = result.all.latency.p99 if result.all.latency.count else None
    return OfferedPoint(result.offered_per_s, result.ok_per_s, p99_ms, result.seconds, not result.health.complaint)


def rate_varies(result: PhaseResult) -> bool:
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


BINS_A_DECADE = 20
_OUTCOMES = {
    TrialOutcome.KEPT: Cell("kept", tone=Tone.GOOD),
    TrialOutcome.BROKEN: Cell("broken", tone=Tone.BAD),
    TrialOutcome.UNUSABLE: Cell("generator's limit", tone=Tone.QUIET),
}
_LATENCY_OVER_TIME = (
    "Above: p50 and p99 of what was to be sent in each second; a p99 that climbs while the rate stays is a queue that"
    " grows. Below: "
)
_RATES = (
    "what was offered, what of it was answered, however late, and what went wrong; a gap between offered and answered"
    " is work refused or failed. Bands are phases."
)


def latency_section(run: Run) -> Section | Absence:
    """How latencies are spread, of the phases that matter."""
    phases = [phase for phase in drawn_phases(run) if phase.histogram()]
    if not phases:
        return Absence("Latency distribution", "Nothing was answered and nothing timed out, so there is no latency.")
    names = list(dict.fromkeys(one_line(phase.phase, at_most=PHASE_CHARACTERS) for phase in phases))
    return Section(
        "latency",
        "Latency distribution",
        plot=PlotName.LATENCY,
        how_to_read="Left: how many requests took how long (the further left, the better). Right: the latency that a"
        " share of the requests kept; the tail to the right is what the unluckiest waited. Both axes of latency are"
        " logarithmic: a bar's width is always 12 %.",
        tables=(_distribution(phases),),
        remarks=(_which(run, names),),
    )


def time_section(run: Run) -> Section | Absence:
    """Percentiles and rates second by second."""
    if not any(result.all.intended and result.timeline for result in run.phases):
        return Absence("Over time", "No phase has seconds to show: nothing was asked, or nothing but reloads.")
    has_latency = any(result.all.latency.count for result in run.phases)
    width = seconds_a_point(run)
    each = "Each point is one second" if width == 1 else f"Each point is {width} seconds: their mean p50, highest p99"
    return Section(
        "time",
        "Over time",
        plot=PlotName.TIME,
        how_to_read=f"{_LATENCY_OVER_TIME if has_latency else 'Plotted: '}{_RATES}",
        remarks=(f"{each}, by the intended send time.",),
    )


def throughput_section(run: Run) -> Section | Absence:
    """Answered rate and p99 against the offered rate, and where the SLO breaks."""
    points = offered_points(run, Side.TARGET)
    if not has_a_curve(points):
        return Absence("Throughput against offered rate", _no_curve(points))
    return Section(
        "throughput",
        "Throughput against offered rate",
        sentences=(knee_sentence(run, points),),
        plot=PlotName.THROUGHPUT,
        how_to_read="Above: on the dashed line everything that was offered was answered, however late; below it"
        " requests were refused or failed. Below: the p99 that went with it; a server that falls behind shows here."
        " Filled circles keep the SLO, crosses do not; grey triangles are the load generator's limit and say nothing of"
        " the server.",
        tables=() if is_knee_search(run) else (_points(points, run.slo_p99_ms),),
        remarks=(
            "A phase with one rate is a point a round. Where the rate changes within a phase, seconds of about the"
            " same rate are one point, and its p99 is the median of theirs.",
        ),
    )


def _which(run: Run, names: list[str]) -> str:
    named = join([f"“{name}”" for name in names])
    if is_knee_search(run):
        return f"Shown: {named}, the best trial and the lowest rate above it that broke the SLO."
    judged = len({result.phase for result in run.phases if result.is_judged})
    left = f" (the first {MOST_DRAWN} of {judged} judged phases)" if judged > MOST_DRAWN else ""
    return f"Shown: {named}{left}; answers and timeouts count, refusals do not."


def _distribution(phases: list[PhaseRounds]) -> Table:
    bounds = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
    used = [bound for bound in bounds if any(_splits(phase, bound) for phase in phases)]
    rows = tuple(
        (Cell(phase_name(phase)), *(Cell(percent(_share_within(phase, bound))) for bound in used)) for phase in phases
    )
    return Table(
        ("phase", *(f"≤ {bound:,} ms" for bound in used)), rows, caption="Share of answers and timeouts that took"
    )


def _splits(phase: PhaseRounds, bound_ms: float) -> bool:
    return 0 < _share_within(phase, bound_ms) < 1 or _share_within(phase, bound_ms) == 1 > _share_within(
        phase, bound_ms / 2.5
    )


def _share_within(phase: PhaseRounds, bound_ms: float) -> float:
    """By the histogram: bins end on 1, 10, 100 exactly and within 1 % of the others."""
    histogram = phase.histogram()
    total = sum(amount for _, amount in histogram)
    return sum(amount for upper_ms, amount in histogram if upper_ms <= bound_ms * 1.01) / total


def _no_curve(points: tuple[OfferedPoint, ...]) -> str:
    if not points:
        return "No open loop answered, so nothing was offered at a rate of its own."
    return (
        f"Only one rate was offered ({plain_number(points[0].offered_per_s)}/s), and a curve needs several:"
        " `penstock load knee` finds the highest that keeps the SLO."
    )


def knee_sentence(run: Run, points: tuple[OfferedPoint, ...]) -> str:
    """Where the SLO breaks, in a sentence. points: at least one."""
    knee = knee_of(run)
    slo = f"p99 within {plain_number(run.slo_p99_ms)} ms"
    if knee is None:
        return f"No offered rate kept {slo}; the lowest was {plain_number(points[0].offered_per_s)}/s."
    if searched_knee(run) is not None:
        return f"The knee: {plain_number(knee)}/s is the highest rate that the search confirmed to keep {slo}."
    highest = max(point.offered_per_s for point in points if point.is_usable)
    if knee >= highest:
        return f"The highest rate that was offered, {plain_number(knee)}/s, kept {slo}: the knee lies above it."
    said = f"The knee: {plain_number(knee)}/s is the last offered rate that kept {slo} before one that did not."
    if any(point.outcome(run.slo_p99_ms) is TrialOutcome.KEPT and point.offered_per_s > 1.1 * knee for point in points):
        said += " A higher rate kept it, too, so server or machine were not steady: repeat it, with more rounds."
    return said


def _points(points: tuple[OfferedPoint, ...], slo_p99_ms: float) -> Table:
    rows = tuple(
        (
            Cell(number(point.offered_per_s)),
            Cell(number(point.ok_per_s)),
            Cell(NOTHING if point.p99_ms is None else number(point.p99_ms)),
            Cell(plain_number(point.seconds)),
            _OUTCOMES[point.outcome(slo_p99_ms)],
        )
        for point in points
    )
    return Table(("offered /s", "answered /s", "p99 ms", "for s", "SLO"), rows, frozenset({4}))
