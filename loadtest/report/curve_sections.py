"""What is drawn of requests: latency, its course over time, and throughput against the offered rate."""

from loadtest.knee import Outcome
from loadtest.report.document import Absence, Cell, PlotName, Section, Table, Tone
from loadtest.report.figures_section import PHASE_CHARACTERS, phase_name
from loadtest.report.offered import OfferedPoint, has_a_curve, knee_of, offered_points
from loadtest.report.rounds import MOST_DRAWN, PhaseRounds, drawn_phases, is_knee_search, searched_knee
from loadtest.report.timeline import seconds_a_point
from loadtest.report.wording import NOTHING, join, number, one_line, percent, plain_number
from loadtest.results import Run, Side

BINS_A_DECADE = 20
_OUTCOMES = {
    Outcome.KEPT: Cell("kept", tone=Tone.GOOD),
    Outcome.BROKEN: Cell("broken", tone=Tone.BAD),
    Outcome.UNUSABLE: Cell("generator's limit", tone=Tone.QUIET),
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
        sentences=(_knee(run, points),),
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


def _knee(run: Run, points: tuple[OfferedPoint, ...]) -> str:
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
    if any(point.outcome(run.slo_p99_ms) is Outcome.KEPT and point.offered_per_s > 1.1 * knee for point in points):
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
