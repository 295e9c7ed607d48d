"""Why to believe the figures, or not: the other witness, the generator's health, errors, and the conditions."""

import math
from collections.abc import Callable

from penstock_load.report.document import (
    NOTHING,
    Absence,
    Cell,
    Section,
    Table,
    Tone,
    count,
    number,
    one_line,
    percent,
    plain_number,
    sentence,
    times,
)
from penstock_load.report.figures import phase_name, spread_cell
from penstock_load.report.rounds import PhaseRounds, phase_rounds, spread_of
from penstock_load.results import GeneratorHealth, PhaseResult, Run, ServerQuantile, Side, Witness

_QUANTILES: tuple[tuple[str, float, Callable[[PhaseResult], float]], ...] = (
    ("p50", 0.5, lambda result: result.all.service.p50),
    ("p90", 0.9, lambda result: result.all.service.p90),
    ("p99", 0.99, lambda result: result.all.service.p99),
)
_MOST_ERRORS = 50


def witness_section(run: Run) -> Section | Absence:
    """Client and server side by side."""
    phases = [phase for phase in phase_rounds(run) if _witnesses(phase)]
    if not phases:
        return Absence("Two witnesses", "The server's metrics were not read, so the client is the only witness.")
    sources = dict.fromkeys(witness.source for phase in phases for witness in _witnesses(phase))
    return Section(
        "witnesses",
        "Two witnesses",
        sentences=(
            "The client's service time (from the moment it was sent) beside what the server's own histogram says. A"
            " histogram knows only between which bounds a quantile lies, and the server does not see the network.",
        ),
        tables=(_witness_rows(phases),),
        remarks=(*_disagreements(phases), f"Server's figures from {', '.join(map(one_line, sources))}."),
    )


def generator_section(run: Run) -> Section | None:
    """Whether the load generator kept up."""
    if not run.phases:
        return None
    complaints = [
        f"{phase_name(phase)}, round {result.round}: {sentence(result.health.complaint)}"
        for phase in phase_rounds(run)
        for result in phase.rounds
        if result.health.complaint
    ]
    verdict = complaints or ["It kept up in every phase."]
    head = ("phase", "intended /s", "sent /s", "lag p50 ms", "lag p99 ms", "CPU, busiest process", "processes")
    return Section(
        "generator",
        "The load generator's health",
        sentences=(
            "Lag is how much later than intended a request was handed to the socket. It is part of every latency, and"
            " a generator that lags or fills its core measures itself.",
        ),
        tables=(Table(head, tuple(_health(phase) for phase in phase_rounds(run))),),
        remarks=tuple(dict.fromkeys(verdict)),
    )


def error_section(run: Run) -> Section | Absence:
    """What was answered instead of a result."""
    rows = [row for phase in phase_rounds(run) for row in _errors(phase)]
    if not rows:
        went_wrong = sum(result.all.intended - result.all.ok for result in run.phases)
        why = "No request went wrong." if not went_wrong else f"{count(went_wrong)} requests went wrong without a text."
        return Absence("Errors", why)
    left = len(rows) - _MOST_ERRORS
    return Section(
        "errors",
        "Errors",
        sentences=("What refused, failed and timed-out requests said; the most frequent texts of each phase.",),
        tables=(Table(("phase", "count", "text"), tuple(rows[:_MOST_ERRORS]), frozenset({0, 2})),),
        remarks=(f"{times(left, 'more row')} left out.",) if left > 0 else (),
    )


def condition_section(run: Run) -> Section:
    """What the figures belong to, and how they were counted."""
    return Section(
        "conditions",
        "Conditions",
        tables=(Table(("", ""), _conditions(run), frozenset({0, 1})),),
        remarks=(
            "Latency counts from the moment at which the schedule meant a request to be sent, so that a stalled server"
            " cannot hide what waited behind the stall.",
            "Timeouts count as long as they were waited for. Refusals (429, 503, 504 and their gRPC twins) and"
            " failures are counted apart, for a quick “no” is no quick answer.",
            "Percentiles are nearest rank: each is a latency that a request had.",
            "A spread is the median of the rounds with the lowest and the highest round.",
        ),
    )


def _witnesses(phase: PhaseRounds) -> list[Witness]:
    return [result.witness for result in phase.rounds if result.witness and _says_something(result.witness)]


def _says_something(witness: Witness) -> bool:
    return bool(witness.answered or witness.quantiles or witness.disagreements)


def _witness_rows(phases: list[PhaseRounds]) -> Table:
    head = ["phase", "answers: client", "server", "mean ms: client", "server"]
    for name, _, _ in _QUANTILES:
        head += [f"{name} ms: client", "server"]
    return Table(tuple(head), tuple(_witness_row(phase) for phase in phases))


def _witness_row(phase: PhaseRounds) -> tuple[Cell, ...]:
    rounds = [result for result in phase.rounds if result.witness and _says_something(result.witness)]
    witnesses = _witnesses(phase)
    is_single = len(rounds) < 2
    cells = [
        Cell(phase_name(phase)),
        Cell(count(sum(result.all.ok for result in rounds))),
        Cell(count(sum(witness.answered for witness in witnesses))),
        spread_cell(spread_of([result.all.service.mean for result in rounds]), is_single=is_single),
        spread_cell(spread_of([witness.mean_ms for witness in witnesses]), is_single=is_single),
    ]
    for _, quantile, figure in _QUANTILES:
        cells.append(spread_cell(spread_of([figure(result) for result in rounds]), is_single=is_single))
        cells.append(Cell(_interval(witnesses, quantile)))
    return tuple(cells)


def _interval(witnesses: list[Witness], quantile: float) -> str:
    """Between which bounds the quantile lies in every round."""
    found = [one for witness in witnesses if (one := _quantile(witness, quantile))]
    if not found:
        return NOTHING
    low, high = min(one.low_ms for one in found), max(one.high_ms for one in found)
    return f"> {plain_number(low)}" if math.isinf(high) else f"{plain_number(low)} to {plain_number(high)}"


def _quantile(witness: Witness, quantile: float) -> ServerQuantile | None:
    return next((one for one in witness.quantiles if math.isclose(one.quantile, quantile)), None)


def _disagreements(phases: list[PhaseRounds]) -> tuple[str, ...]:
    sentences = [
        f"{phase_name(phase)}, round {result.round}: {sentence(text)}"
        for phase in phases
        for result in phase.rounds
        if result.witness
        for text in result.witness.disagreements
    ]
    return tuple(sentences) or ("The two agree.",)


def _health(phase: PhaseRounds) -> tuple[Cell, ...]:
    healths = [result.health for result in phase.rounds]
    is_single = len(healths) < 2

    def cell(figure: Callable[[GeneratorHealth], float]) -> Cell:
        return spread_cell(spread_of([figure(health) for health in healths]), is_single=is_single)

    tone = Tone.BAD if any(health.complaint for health in healths) else Tone.PLAIN
    return (
        Cell(phase_name(phase), "the bottleneck" if tone is Tone.BAD else "", tone),
        cell(lambda health: health.intended_per_s),
        cell(lambda health: health.sent_per_s),
        cell(lambda health: health.lag_p50_ms),
        cell(lambda health: health.lag_p99_ms),
        Cell(percent(max(health.cpu for health in healths))),
        Cell(str(max(health.processes for health in healths))),
    )


def _errors(phase: PhaseRounds) -> list[tuple[Cell, ...]]:
    return [(Cell(phase_name(phase)), Cell(count(amount)), Cell(one_line(text))) for text, amount in phase.errors()]


def _conditions(run: Run) -> tuple[tuple[Cell, Cell], ...]:
    machine = run.machine
    gpus = ", ".join(machine.gpus) if machine.gpus else "none"
    facts = [
        ("target", run.target_url),
        ("server, by its own word", run.server or "it did not say"),
        ("server's hardware", _server_hardware(run)),
        ("commit", run.commit),
        ("beside", run.beside_url),
        ("models", ", ".join(run.models)),
        ("SLO", f"p99 within {plain_number(run.slo_p99_ms)} ms"),
        ("rounds", _rounds(run)),
        ("load generator's machine", f"{machine.cpu}, {times(machine.cores, 'core')}"),
        ("memory", f"{number(machine.memory_gib)} GiB"),
        ("GPUs", gpus),
        ("system", machine.system),
        ("versions", ", ".join(f"{what} {which}" for what, which in machine.versions)),
        ("command", run.command),
        ("seed", str(run.seed)),
        ("began", run.began_at),
    ]
    return tuple((Cell(name), Cell(one_line(value, at_most=2000))) for name, value in facts if value)


def _server_hardware(run: Run) -> str:
    if run.is_local:
        here = "the load generator's machine, which it shares"
        return f"{run.server_hardware}; {here}" if run.server_hardware else here
    return f"{run.server_hardware or 'not known (--hardware says it)'}; another machine"


def _rounds(run: Run) -> str:
    asked = sum(result.all.intended for result in run.phases)
    interleaved = ", the two sides interleaved" if any(r.side is Side.BESIDE for r in run.phases) else ""
    return f"{count(run.rounds)}{interleaved}; {count(asked)} requests in all"
