"""The key figures of each phase: how many, how fast, how well."""

from collections.abc import Callable

from loadtest.report.document import Cell, Section, Table, Tone, drop_columns
from loadtest.report.rounds import PhaseRounds, phase_rounds, spread_of
from loadtest.report.verdict_section import spread_cell
from loadtest.report.wording import NOTHING, count, one_line, percent, plain_number
from loadtest.results import PhaseResult, RequestSummary, Run, Side

_WENT_WRONG = ("refused", "failed", "timed out", "not sent")
REQUESTS_HEAD = (
    *("phase", "loop", "rounds", "offered /s", "answered /s", "good /s", "good share"),
    *_WENT_WRONG,
    "CPU ms an answer",
)
LATENCY_HEAD = ("phase", "p50", "p90", "p95", "p99", "p99.9", "max", "counted")
PHASE_CHARACTERS = 40
_LATENCIES: tuple[Callable[[PhaseResult], float], ...] = (
    lambda result: result.all.latency.p50,
    lambda result: result.all.latency.p90,
    lambda result: result.all.latency.p95,
    lambda result: result.all.latency.p99,
    lambda result: result.all.latency.p999,
    lambda result: result.all.latency.highest,
)


def figures_section(run: Run) -> Section | None:
    """Requests and latencies a phase; None where no phase asked anything (only reloads)."""
    if not run.phases:
        return None
    labels = {summary.label for result in run.phases for summary in result.by_request}
    tables = [request_rows(run), latency_rows(run)]
    if len(labels) > 1:
        tables.append(_kind_rows(run))
    return Section("figures", "Key figures of each phase", sentences=_sentences(run), tables=tuple(tables))


def request_rows(run: Run) -> Table:
    """What was offered and what came of it; a row a phase and side. Counts are sums over the rounds."""
    rows = tuple(_requests(phase) for phase in phase_rounds(run))
    table = Table(REQUESTS_HEAD, rows, frozenset({0, 1}), "Requests")
    return drop_columns(drop_columns(table, NOTHING), "0", of=_WENT_WRONG)


def latency_rows(run: Run) -> Table:
    """Percentiles in milliseconds, from the intended send time; a row a phase and side."""
    rows = tuple(_latencies(phase, run.slo_p99_ms) for phase in phase_rounds(run))
    return Table(LATENCY_HEAD, rows, frozenset({0}), "Latency, ms, from the intended send time")


def phase_name(phase: PhaseRounds) -> str:
    """The phase as tables name it, with its side where that is not the target."""
    name = one_line(phase.phase, at_most=PHASE_CHARACTERS)
    return name if phase.side is Side.TARGET else f"{name} · beside"


def phase_cell(phase: PhaseRounds) -> Cell:
    """The phase's name, and what it is for."""
    purposes = ["judged"] * phase.first.is_judged + ["capacity"] * phase.first.is_capacity
    return Cell(phase_name(phase), ", ".join(word for word in purposes if word != phase.phase))


def _sentences(run: Run) -> tuple[str, ...]:
    slo = f"{plain_number(run.slo_p99_ms)} ms"
    said = [f"Good: answered right, and within the SLO of {slo}."]
    if run.rounds > 1:
        said.append("Figures are the median of the rounds (lowest–highest); counts are the sum of all rounds.")
    if any(not result.is_open_loop for result in run.phases):
        said.append(
            "In a closed loop each caller waits for its answer before it asks again, so what it offers is what the"
            " server takes, and its latencies are not those of a given rate."
        )
    if run.beside_url:
        said.append(f"“Beside” is {one_line(run.beside_url)}, asked the same in the same run.")
    return tuple(said)


def _requests(phase: PhaseRounds) -> tuple[Cell, ...]:
    is_single = len(phase.rounds) < 2

    def rate(figure: Callable[[PhaseResult], float]) -> Cell:
        return spread_cell(phase.spread(figure), is_single=is_single)

    good = phase.total(lambda summary: summary.good)
    intended = phase.total(lambda summary: summary.intended)
    return (
        phase_cell(phase),
        Cell("open" if phase.first.is_open_loop else "closed"),
        Cell(str(len(phase.rounds))),
        rate(lambda result: result.offered_per_s) if phase.first.is_open_loop else Cell(NOTHING),
        rate(lambda result: result.ok_per_s),
        rate(lambda result: result.good_per_s),
        Cell(percent(good / intended) if intended else NOTHING),
        _bad(phase, lambda summary: summary.refused),
        _bad(phase, lambda summary: summary.failed),
        _bad(phase, lambda summary: summary.timeouts),
        _bad(phase, lambda summary: summary.not_sent),
        _cpu(phase),
    )


def _bad(phase: PhaseRounds, figure: Callable[[RequestSummary], int]) -> Cell:
    amount, intended = phase.total(figure), phase.total(lambda summary: summary.intended)
    if not amount:
        return Cell("0")
    return Cell(count(amount), percent(amount / intended) if intended else "", Tone.BAD)


def _cpu(phase: PhaseRounds) -> Cell:
    told = [result.cpu_ms_per_ok for result in phase.rounds if result.cpu_ms_per_ok is not None]
    return spread_cell(spread_of(told), is_single=len(told) < 2) if told else Cell(NOTHING)


def _latencies(phase: PhaseRounds, slo_p99_ms: float) -> tuple[Cell, ...]:
    spreads = [phase.waited_spread(figure) for figure in _LATENCIES]
    is_single = len(phase.rounds) < 2
    cells = [spread_cell(spread, is_single=is_single) if spread else Cell(NOTHING) for spread in spreads]
    p99 = spreads[3]
    if p99 and p99.median > slo_p99_ms and phase.first.is_open_loop:
        cells[3] = Cell(cells[3].text, cells[3].detail, Tone.BAD)
    counted = Cell(count(sum(result.all.latency.count for result in phase.rounds)))
    return (phase_cell(phase), *cells, counted)


def _kind_rows(run: Run) -> Table:
    head = ("phase", "request", "asked", "answered", "good share", "p50 ms", "p99 ms")
    rows = [row for phase in phase_rounds(run) for row in _kinds(phase)]
    return Table(head, tuple(rows), frozenset({0, 1}), "By kind of request")


def _kinds(phase: PhaseRounds) -> list[tuple[Cell, ...]]:
    labels = dict.fromkeys(summary.label for result in phase.rounds for summary in result.by_request)
    return [_kind(phase, label) for label in labels]


def _kind(phase: PhaseRounds, label: str) -> tuple[Cell, ...]:
    summaries = [summary for result in phase.rounds for summary in result.by_request if summary.label == label]
    intended = sum(summary.intended for summary in summaries)
    waited = [summary.latency for summary in summaries if summary.latency.count]
    is_single = len(waited) < 2
    return (
        Cell(phase_name(phase)),
        Cell(one_line(label)),
        Cell(count(intended)),
        Cell(count(sum(summary.ok for summary in summaries))),
        Cell(percent(sum(summary.good for summary in summaries) / intended) if intended else NOTHING),
        spread_cell(spread_of([latency.p50 for latency in waited]), is_single=is_single) if waited else Cell(NOTHING),
        spread_cell(spread_of([latency.p99 for latency in waited]), is_single=is_single) if waited else Cell(NOTHING),
    )
