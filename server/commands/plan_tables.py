"""What `penstock plan` prints for a person."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from server.planning.contenders import Contender
from server.planning.plan import Race
from server.planning.race import Row
from server.planning.search import Rate


def show(races: Sequence[Race], console: Console) -> None:
    """A table a race, the fastest first; above it the bounds, below it the knobs, at the end what the numbers mean."""
    for race in races:
        _show_one(console, race)
    console.print(
        "rate: requests/s at which the share is met, ± its 95 % confidence interval over the seeds; batch, p50 and p99 "
        "at that rate. at 1.5x: of Nexus' bound offered, requests/s answered in time, then % refused/late/timed out. "
        "Every policy but penstock has the knobs that were best for its rate.",
        style="dim",
    )


def _show_one(console: Console, race: Race) -> None:
    case, bounds = race.case, race.bounds
    console.print(
        f"[bold]{escape(case.problem.engine.profile.name)}, SLO {case.problem.slo_s * 1e3:g} ms, {case.pattern} "
        f"arrivals, {case.share * 100:g} % in time[/bold]"
    )
    possible = "" if bounds.possible is None else f"knowing all arrivals {_rate(bounds.possible)}, "
    console.print(
        f"bounds, requests/s: {possible}2 t(b) ≤ SLO (Nexus) {bounds.nexus:.0f}, evenly spaced {bounds.even:.0f}, "
        f"t(b) ≤ SLO {bounds.capacity:.0f}"
    )
    console.print(_table(race))
    for row in _ordered(race):
        tried = f" (best of {row.settings})" if row.settings > 1 else ""
        console.print(f"{row.contender.value}: {row.words}{tried}", style="dim")
    console.print()


def _ordered(race: Race) -> list[Row]:
    return sorted(race.rows, key=lambda one: -one.rate.per_s)


def _table(race: Race) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for title in ("rate", "batch", "p50 ms", "p99 ms"):
        table.add_column(title, justify="right", no_wrap=True)
    if race.bounds.possible is not None:
        table.add_column("of possible", justify="right", min_width=len("possible"))
    for multiple in [multiple for multiple, _ in race.rows[0].overload] if race.rows else []:
        table.add_column(f"at {multiple:g}x", justify="right")
    for row in _ordered(race):
        table.add_row(*_cells(row, race), style="bold" if row.contender is Contender.OURS else None)
    return table


def _cells(row: Row, race: Race) -> list[str]:
    load = row.at_rate
    cells = [row.contender.value, _rate(row.rate), f"{load.mean_batch:.1f}"]
    cells += [f"{load.p50_s * 1e3:.1f}", f"{load.p99_s * 1e3:.1f}"]
    if race.bounds.possible is not None:
        cells.append(f"{row.rate.per_s / max(race.bounds.possible.per_s, 1e-9):.0%}")
    for _, over in row.overload:
        lost = "/".join(f"{share * 100:.0f}" for share in (over.refused, over.late, over.expired))
        cells.append(f"{over.goodput_per_s:.0f} {lost}")
    return cells


def _rate(rate: Rate) -> str:
    return f"{rate.per_s:.0f} ± {rate.plus_minus:.0f}"
