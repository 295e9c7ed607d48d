"""From locust's statistics to figures, verdicts and one table."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.arrival_plan import Spent
from loadtest.results import Measurement, Spread, State, Verdict
from loadtest.scenario import Scenario
from loadtest.targets import with_unit
from loadtest.users.terms import phase_name
from loadtest.verdict import exit_code

PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}
LEAST_SHARE = 0.95  # of the intended requests, below which a run is no run of its scenario
COLOURS = {State.PASS: "green", State.FAIL: "red", State.NOT_COMPARABLE: "yellow", State.NOT_MEASURED: "yellow"}


def bucket(response_time_ms: float) -> float:
    """A latency as locust's statistics keep it: three digits, where locust by itself rounds 104.9 ms to 100."""
    return float(f"{response_time_ms:.3g}")


def judged_entries(entries: Iterable[Any], scenario: Scenario | None) -> list[Any]:
    """The rows of locust's statistics that count: all, or those of the scenario's judged phases."""
    if scenario is None:
        return list(entries)
    phases = [phase.name for phase in scenario.phases if phase.is_judged]
    names = {phase_name(ask.label, phase) for ask, phase in itertools.product(scenario.requests, phases)}
    return [entry for entry in entries if entry.name in names]


def measurements(entries: Sequence[Any], seconds: float, *, slo_p99_ms: float) -> tuple[Measurement, ...]:
    """The figures that locust can tell of so many seconds; none where nothing was asked.

    slo_p99_ms: within which an answer is good. Latencies are of answers and timeouts, from the moment of sending:
    locust knows no other.
    """
    requests = sum(entry.num_requests for entry in entries)
    failures = sum(entry.num_failures for entry in entries)
    if not requests or seconds <= 0:
        return ()
    good = sum(
        count for entry in entries for latency_ms, count in entry.response_times.items() if latency_ms <= slo_p99_ms
    )
    figures = [
        ("ok_per_s", "/s", (requests - failures) / seconds),
        ("good_per_s", "/s", good / seconds),
        ("error_share", "share", failures / requests),
        *((name, "ms", value) for name, value in _percentiles(entries).items()),
    ]
    return tuple(Measurement(name, unit, Spread(value, value, value), 1) for name, unit, value in figures)


def _percentiles(entries: Sequence[Any]) -> dict[str, float]:
    """By nearest rank; none where nothing has a latency."""
    counts: dict[float, int] = {}
    for latency_ms, count in itertools.chain.from_iterable(entry.response_times.items() for entry in entries):
        counts[latency_ms] = counts.get(latency_ms, 0) + count
    total = sum(counts.values())
    return {name: _at_rank(counts, share * total) for name, share in PERCENTILES.items()} if total else {}


def _at_rank(counts: Mapping[float, int], rank: float) -> float:
    seen = itertools.accumulate(counts[latency_ms] for latency_ms in sorted(counts))
    return next(latency_ms for latency_ms, until in zip(sorted(counts), seen, strict=True) if until >= rank)


def shortfall(scenario: Scenario, spent: Mapping[str, Spent], requests: int) -> str:
    """Where far less was asked in the judged phases than the schedule meant: a sentence, else empty."""
    intended = sum(spent[phase.name].intended for phase in scenario.phases if phase.is_judged and phase.name in spent)
    if not intended:
        return "no judged phase was reached"
    # Poisson arrivals differ from their mean by chance: three standard deviations are no shortfall.
    if requests >= LEAST_SHARE * intended - 3 * intended**0.5:
        return ""
    return (
        f"{requests} requests were sent where {scenario.name} means {intended:.0f}: late answers held locust's users "
        f"back; penstock load run {scenario.name} sends whatever the answers do"
    )


def table(rows: Sequence[Verdict]) -> Table:
    """The rows for a person."""
    shown = Table(title="Verdict")
    for column in ("target", "verdict", "wanted", "measured", "why"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        measured = "" if row.value is None else with_unit(row.value, row.unit)
        wanted = f"{row.comparison.replace('_', ' ')} {with_unit(row.figure, row.unit)}"
        shown.add_row(row.target_id, f"[{COLOURS[row.state]}]{row.state}[/]", wanted, measured, escape(row.why))
    return shown


def show(rows: Sequence[Verdict], complaints: Sequence[str], console: Console) -> None:
    """Prints the table, what cannot be trusted, and the word for the whole; nothing where nothing was judged."""
    if rows:
        console.print(table(rows))
    for complaint in complaints:
        console.print(f"[red]not to be trusted:[/] {escape(complaint)}", soft_wrap=True)
    if rows or complaints:
        console.print("[red]FAIL[/]" if exit_code(rows, complaints) else "[green]PASS[/]")
