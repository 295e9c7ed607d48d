"""Report sections: verdicts, measurements and figures of each phase."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock_load.measure.measures import MEASURES
from penstock_load.report.document import (
    NOTHING,
    Absence,
    Cell,
    Section,
    Table,
    Tone,
    count,
    drop_columns,
    number,
    one_line,
    percent,
    plain_number,
    sentence,
    times,
)
from penstock_load.report.rounds import PhaseRounds, phase_rounds, spread_of
from penstock_load.results import Measurement, PhaseResult, RequestSummary, Run, Side, Spread, State, Verdict

TONES = {State.PASS: Tone.GOOD, State.FAIL: Tone.BAD, State.NOT_COMPARABLE: Tone.QUIET, State.NOT_MEASURED: Tone.QUIET}
HEAD = ("state", "what", "measured", "target", "of the target", "hardware", "why")
_SIGNS = {"at_least": "≥", "at_most": "≤"}
_MEANINGS = {measure.name: measure.meaning for measure in MEASURES}


def verdict_section(run: Run) -> Section | Absence:
    """A row a target."""
    if not run.verdicts:
        return Absence(
            "Each target", "No documented target speaks of this scenario, so there is nothing to pass or fail."
        )
    shown, folded = split_verdicts(run.verdicts)
    tables = [_verdict_rows(run, shown)]
    if folded:
        tables.append(replace(_verdict_rows(run, folded), caption=folded_text(len(folded)), is_folded=True))
    return Section("verdict", "Each target", sentences=(_rule(run),), tables=tuple(tables))


def folded_text(amount: int) -> str:
    """What is folded, in words."""
    return f"{times(amount, 'target')} of other hardware, models or SLO"


def split_verdicts(verdicts: Iterable[Verdict]) -> tuple[list[Verdict], list[Verdict]]:
    """The verdicts to show, those that failed first, and those of other hardware to fold; all of one kind are shown."""
    ordered = ordered_verdicts(verdicts)
    folded = [verdict for verdict in ordered if verdict.state is State.NOT_COMPARABLE]
    shown = [verdict for verdict in ordered if verdict.state is not State.NOT_COMPARABLE]
    return (shown, folded) if shown else (folded, [])


def _verdict_rows(run: Run, verdicts: Iterable[Verdict]) -> Table:
    spreads = {measurement.measure: measurement.spread for measurement in run.measurements}
    cells = tuple(_row(verdict, spreads.get(verdict.measure)) for verdict in verdicts)
    return drop_columns(Table(HEAD, cells, frozenset({0, 1, 5, 6})), NOTHING)


def ordered_verdicts(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those that failed first, then those that passed, those that would have been judged, then the others."""
    order = (State.FAIL, State.PASS, State.NOT_MEASURED, State.NOT_COMPARABLE)

    def place(verdict: Verdict) -> int:
        is_without = verdict.state is State.NOT_MEASURED and verdict.value is None
        return len(order) if is_without else order.index(verdict.state)

    return sorted(verdicts, key=place)


def goal_text(verdict: Verdict) -> str:
    """The goal and whether it is reached; empty where the target has none."""
    if verdict.goal is None:
        return ""
    reached = {True: ", reached", False: ", not reached", None: ""}[verdict.meets_goal]
    return f"goal {with_unit(plain_number(verdict.goal), verdict.unit)}{reached}"


def measurement_section(run: Run) -> Section | None:
    """What was measured, whether or not a target speaks of it."""
    if not run.measurements:
        return None
    rows = tuple(_measurement(measurement) for measurement in run.measurements)
    return Section(
        "measurements",
        "Every figure that a target can speak of",
        sentences=("Each is the median of the rounds, with the lowest and the highest round behind it.",),
        tables=(Table(("figure", "median", "unit", "rounds", "what it is"), rows, frozenset({0, 2, 4})),),
    )


def spread_cell(spread: Spread, *, is_single: bool = False) -> Cell:
    """The median, and beside it the range, where there was more than one round."""
    is_same = number(spread.low) == number(spread.high)
    return Cell(number(spread.median), "" if is_single or is_same else _range(spread))


def with_unit(value: str, unit: str) -> str:
    """The figure and its unit: 41.2 ms, 60/s; shares and ratios are bare."""
    if unit in ("", "ratio", "share"):
        return value
    return f"{value}{unit}" if unit.startswith("/") else f"{value} {one_line(unit)}"


def _rule(run: Run) -> str:
    rule = "A row passes where the median of the rounds meets its target."
    if any(verdict.state is State.NOT_COMPARABLE for verdict in run.verdicts):
        rule += " A figure of other hardware, SLO or model is neither passed nor failed: the row shows the ratio."
    return rule


def _row(verdict: Verdict, spread: Spread | None) -> tuple[Cell, ...]:
    tone = TONES[verdict.state]
    return (
        Cell(verdict.state.value.upper(), tone=tone),
        Cell(one_line(verdict.title), one_line(verdict.target_id)),
        _measured(verdict, spread),
        Cell(_target(verdict), goal_text(verdict)),
        _ratio(verdict),
        Cell("any" if verdict.hardware == "any" else one_line(verdict.hardware)),
        Cell(sentence(verdict.why), f"source: {one_line(verdict.source)}" if verdict.source else ""),
    )


def _measured(verdict: Verdict, spread: Spread | None) -> Cell:
    if verdict.value is None:
        return Cell(NOTHING)
    detail = _range(spread) if spread and spread.low < spread.high else ""
    return Cell(with_unit(number(verdict.value), verdict.unit), detail)


def _ratio(verdict: Verdict) -> Cell:
    """Of what was judged the state says enough; of other hardware the ratio is all there is to say."""
    if verdict.ratio is None or verdict.state is not State.NOT_COMPARABLE:
        return Cell(NOTHING)
    return Cell(f"{number(verdict.ratio)} ×")


def _target(verdict: Verdict) -> str:
    sign = _SIGNS.get(verdict.comparison, one_line(verdict.comparison))
    if not verdict.figure and verdict.comparison not in _SIGNS:
        return NOTHING
    return f"{sign} {with_unit(plain_number(verdict.figure), verdict.unit)}"


def _range(spread: Spread) -> str:
    return f"{number(spread.low)}–{number(spread.high)}"


def _measurement(measurement: Measurement) -> tuple[Cell, ...]:
    cell = spread_cell(measurement.spread, is_single=measurement.rounds < 2)
    meaning = _MEANINGS.get(measurement.measure, "")
    unit = one_line(measurement.unit)
    return (Cell(one_line(measurement.measure)), cell, Cell(unit), Cell(str(measurement.rounds)), Cell(meaning))


WORTH_SAYING_CORES = 0.3


def neighbours(run: Run) -> str:
    """One sentence where programs other than server and generator took cores in a judged phase, else empty.

    Only if the server runs on this machine; of the worst judged phase.
    """
    judged = [phase for phase in run.phases if phase.is_judged] if run.is_local else []
    cores, phase = max(((_others(one, run.machine.cores), one.phase) for one in judged), default=(0.0, ""))
    if cores < WORTH_SAYING_CORES:
        return ""
    return (
        f"While {phase} ran, other programs kept {number(cores)} of the machine's {run.machine.cores} cores busy: "
        "on a quieter machine the figures would be better"
    )


def _others(phase: PhaseResult, cores: int) -> float:
    """Busy cores that neither the server's processes nor the drivers account for, as a mean over the phase."""
    read = [
        (second.machine_cpu * cores, second.server_cpu)
        for second in phase.timeline
        if second.machine_cpu is not None and second.server_cpu is not None
    ]
    if not read:
        return 0.0
    elsewhere = sum(busy - served for busy, served in read) / len(read)
    return elsewhere - phase.health.cpu * phase.health.processes


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
    """Requests and latencies by phase; None if no phase sent requests (only reloads)."""
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
    figures = [result.cpu_ms_per_ok for result in phase.rounds if result.cpu_ms_per_ok is not None]
    return spread_cell(spread_of(figures), is_single=len(figures) < 2) if figures else Cell(NOTHING)


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
