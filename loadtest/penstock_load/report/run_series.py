"""Groups earlier runs into comparable series, with a table of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_load.measure.history import RunSummary
from penstock_load.report.document import (
    NOTHING,
    Cell,
    Table,
    Tone,
    drop_columns,
    moment,
    number,
    one_line,
    percent,
    times,
)

HEAD = (
    "began",
    "commit",
    "outcome",
    "answered /s",
    "p50 ms",
    "p99 ms",
    "not answered",
    "capacity /s",
    "load ms",
    "streams",
    "server",
    "run",
)
_TONES = {"pass": Tone.GOOD, "fail": Tone.BAD}


@dataclass(frozen=True, slots=True)
class RunSeries:
    """Comparable runs: same scenario, models, SLO and machine; newest first, at least one."""

    runs: tuple[RunSummary, ...]

    @property
    def title(self) -> str:
        """The scenario, its models and the machine."""
        last = self.runs[0]
        models = f" ({one_line(', '.join(last.models), at_most=120)})" if last.models else ""
        return f"{one_line(last.scenario, at_most=80)}{models} on {one_line(last.machine, at_most=120)}"


def series_of_runs(runs: Sequence[RunSummary]) -> tuple[RunSeries, ...]:
    """The runs in series, in the order of their newest run."""
    groups: dict[tuple[object, ...], list[RunSummary]] = {}
    for run in runs:
        groups.setdefault((run.scenario, run.models, run.slo_p99_ms, run.machine), []).append(run)
    return tuple(RunSeries(tuple(group)) for group in groups.values())


def history_table(series: RunSeries) -> Table:
    """One row per run. Columns without any value are omitted."""
    table = Table(HEAD, tuple(map(_row, series.runs)), frozenset({0, 1, 2, 10, 11}), times(len(series.runs), "run"))
    return drop_columns(table, NOTHING)


def _row(run: RunSummary) -> tuple[Cell, ...]:
    return (
        Cell(moment(run.began_at)),
        Cell(one_line(run.commit, at_most=40) or NOTHING),
        Cell(one_line(run.outcome, at_most=20).upper(), tone=_TONES.get(run.outcome, Tone.QUIET)),
        *(_figure(value) for value in (run.ok_per_s, run.p50_ms, run.p99_ms)),
        Cell(NOTHING if run.error_share is None else percent(run.error_share)),
        *(_figure(value) for value in (run.capacity_per_s, run.load_ms, run.streams_held)),
        Cell(one_line(run.server, at_most=60)),
        Cell(one_line(run.name, at_most=80)),
    )


def _figure(value: float | None) -> Cell:
    return Cell(NOTHING if value is None else number(value))
