"""The rows of the verdict, and every figure that a target can speak of."""

from loadtest.measure.measures import MEASURES
from loadtest.report.document import Absence, Cell, Section, Table, Tone, drop_columns
from loadtest.report.wording import NOTHING, number, one_line, plain_number, sentence
from loadtest.results import Measurement, Run, Spread, State, Verdict

TONES = {State.PASS: Tone.GOOD, State.FAIL: Tone.BAD, State.NOT_COMPARABLE: Tone.QUIET, State.NOT_MEASURED: Tone.QUIET}
HEAD = ("state", "what", "measured", "target", "of the target", "hardware", "why")
_SIGNS = {"at_least": "≥", "at_most": "≤"}
_MEANINGS = {measure.name: measure.meaning for measure in MEASURES}


def verdict_section(run: Run) -> Section | Absence:
    """A row a target."""
    if not run.verdicts:
        return Absence("Verdict", "No documented target speaks of this scenario, so there is nothing to pass or fail.")
    return Section(
        "verdict",
        "Verdict",
        sentences=(_rule(run),),
        tables=(verdict_rows(run),),
    )


def verdict_rows(run: Run) -> Table:
    """The verdicts as a table, those that failed first."""
    spreads = {measurement.measure: measurement.spread for measurement in run.measurements}
    cells = tuple(_row(verdict, spreads.get(verdict.measure)) for verdict in ordered_verdicts(run))
    return drop_columns(Table(HEAD, cells, frozenset({0, 1, 5, 6})), NOTHING)


def ordered_verdicts(run: Run) -> list[Verdict]:
    """Those that failed first, then those that passed, those that would have been judged, then the others."""
    order = (State.FAIL, State.PASS, State.NOT_MEASURED, State.NOT_COMPARABLE)

    def place(verdict: Verdict) -> int:
        is_without = verdict.state is State.NOT_MEASURED and verdict.value is None
        return len(order) if is_without else order.index(verdict.state)

    return sorted(run.verdicts, key=place)


def goal_in_words(verdict: Verdict) -> str:
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


def spread_cell(spread: Spread, *, tone: Tone = Tone.PLAIN, is_single: bool = False) -> Cell:
    """The median, and beside it the range, where there was more than one round."""
    is_same = number(spread.low) == number(spread.high)
    return Cell(number(spread.median), "" if is_single or is_same else _range(spread), tone)


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
        Cell(_target(verdict), goal_in_words(verdict)),
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
