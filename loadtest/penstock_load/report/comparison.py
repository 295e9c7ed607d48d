"""The section that compares a run with the last comparable run."""

from dataclasses import dataclass

from penstock_load.measure.compare import TITLES, ComparedFigure, RunComparison
from penstock_load.report.document import (
    NOTHING,
    Absence,
    Cell,
    Section,
    Table,
    Tone,
    join,
    moment,
    number,
    one_line,
    sentence,
)

_TITLE = "Compared with the last run"
_LESS_IS_BETTER = ("p50_ms", "p95_ms", "p99_ms", "error_share", "cpu_ms_per_ok")
_SHOWN = ("ok_per_s", "capacity_per_s", "p50_ms", "p99_ms", "error_share", "cpu_ms_per_ok")


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last run of the same scenario, models and machine. comparison: A is that run, B this one."""

    began_at: str
    comparison: RunComparison


def comparison_section(last: LastRun | None) -> Section | Absence:
    """Changes since the last run, and whether they exceed the spread."""
    if last is None:
        return Absence(_TITLE, "The results folder has no earlier run of this scenario, its models and this machine.")
    rows = [row for row in last.comparison.rows if row.measure in _SHOWN]
    table = Table(
        ("figure", "last run (A)", "this run (B)", "change", "larger than the spread?"),
        tuple(map(_row, rows)),
        frozenset({0, 4}),
    )
    changes = [sentence(f"Changed: {one_line(change)}") for change in last.comparison.changes]
    warnings = [sentence(warning[:1].upper() + warning[1:]) for warning in last.comparison.warnings]
    return Section(
        "last-run",
        _TITLE,
        sentences=(_summary(last, rows),),
        tables=(table,) if rows else (),
        remarks=(*(changes or ["Versions and commit are the same."]), *warnings),
    )


def _summary(last: LastRun, rows: list[ComparedFigure]) -> str:
    name = f"{one_line(last.comparison.a, at_most=80)} ({moment(last.began_at)})"
    larger = [f"{TITLES[row.measure]} is {_change(row)}" for row in rows if row.is_larger_than_spread]
    if larger:
        return f"Since {name}, {join(larger)}: more than the spread."
    if rows and all(row.is_larger_than_spread is None for row in rows):
        return f"Since {name}: the spread is unknown, so no difference can be trusted; use --rounds 3."
    return f"Since {name}, no figure changed by more than the spread."


def _change(row: ComparedFigure) -> str:
    if row.ratio is None:
        return f"{number(row.b)} instead of {number(row.a)}"
    word = "higher" if row.ratio > 1 else "lower"
    return f"{abs(row.ratio - 1):.0%} {word}".replace("%", " %")


def _row(row: ComparedFigure) -> tuple[Cell, ...]:
    is_worse = row.b > row.a if row.measure in _LESS_IS_BETTER else row.b < row.a
    tone = (Tone.BAD if is_worse else Tone.GOOD) if row.is_larger_than_spread else Tone.PLAIN
    unit = f", {row.unit}" if row.unit not in ("", "share") else ""
    return (
        Cell(f"{TITLES[row.measure]}{unit}"),
        Cell(number(row.a)),
        Cell(number(row.b)),
        Cell(_signed(row.ratio), _interval(row), tone),
        Cell({True: "yes", False: "no", None: "unknown"}[row.is_larger_than_spread]),
    )


def _signed(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio - 1:+.1%}".replace("%", " %")


def _interval(row: ComparedFigure) -> str:
    if row.low is None or row.high is None:
        return ""
    return f"{_signed(row.low)} to {_signed(row.high)}"
