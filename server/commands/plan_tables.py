"""What `penstock plan` prints for a person."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from server.commands.terminal import table_console
from server.planning.contenders import Contender
from server.planning.plan import Race
from server.planning.race import Row
from server.planning.search import Rate


def show(races: Sequence[Race]) -> None:
    """A table a race, the fastest first, with the bounds above and what the numbers mean below."""
    console = table_console()
    for race in races:
        _show_one(console, race)
    console.print(
        "± is the 95 % confidence interval over the seeds. Each policy but ours, which runs with its defaults, has its "
        "best knobs for that rate; overload is by multiples of Nexus' bound.",
        style="dim",
    )


def _show_one(console: Console, race: Race) -> None:
    case, bounds = race.case, race.bounds
    console.print(
        f"[bold]{case.problem.engine.profile.name}, {case.problem.slo_s * 1e3:g} ms, {case.pattern}[/bold]: "
        f"requests/s with {case.share:.0%} inside the SLO"
    )
    possible = "" if bounds.possible is None else f"knowing all arrivals {_rate(bounds.possible)}, "
    console.print(
        f"bounds: {possible}Nexus (2 t(b) ≤ SLO) {bounds.nexus:.0f}, evenly spaced {bounds.even:.0f}, "
        f"t(b) ≤ SLO {bounds.capacity:.0f}"
    )
    console.print(_table(race))
    console.print()


def _table(race: Race) -> Table:
    table = Table("policy", "rate", "batch", "p50 ms", "p99 ms")
    multiples = [multiple for multiple, _ in race.rows[0].overload] if race.rows else []
    if race.bounds.possible is not None:
        table.add_column("of possible", justify="right")
    for multiple in multiples:
        table.add_column(f"goodput at {multiple:g}x\nrefused, late, expired", justify="right")
    table.add_column("knobs")
    for row in sorted(race.rows, key=lambda one: -one.rate.per_s):
        table.add_row(*_cells(row, race), style="bold" if row.contender is Contender.OURS else None)
    return table


def _cells(row: Row, race: Race) -> list[str]:
    load = row.at_rate
    cells = [row.contender.value, _rate(row.rate), f"{load.mean_batch:.1f}"]
    cells += [f"{load.p50_s * 1e3:.1f}", f"{load.p99_s * 1e3:.1f}"]
    if race.bounds.possible is not None:
        cells.append(f"{row.rate.per_s / max(race.bounds.possible.per_s, 1e-9):.0%}")
    for _, over in row.overload:
        cells.append(f"{over.goodput_per_s:.0f}\n{over.refused:.0%}, {over.late:.0%}, {over.expired:.0%}")
    return [*cells, f"{row.words} (of {row.settings})"]


def _rate(rate: Rate) -> str:
    return f"{rate.per_s:.0f} ± {rate.plus_minus:.0f}"
