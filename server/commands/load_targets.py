"""`penstock load targets`: every documented figure, and how it stands by the committed results."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from loadtest.committed import ResultsError, TargetRow, read_committed, target_rows
from loadtest.targets import TargetsError, read_targets
from server.commands.load_end import write_json
from server.commands.load_options import scenario_or_fail
from server.commands.terminal import fail, table_console

_COLOURS = {"pass": "green", "fail": "red"}


def targets(
    scenario: Annotated[str, typer.Argument(help="only those of this scenario: a name, or a .toml of yours")] = "",
    file: Annotated[Path | None, typer.Option("--targets", help="your targets.toml", dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="an array of objects, and nothing else")] = False,
) -> None:
    """List the documented figures with their conditions, and the verdict of the newest committed result on each."""
    name = scenario_or_fail(scenario).name if scenario.endswith(".toml") else scenario
    try:
        known = read_targets(file, also=(name,))
        rows = target_rows(known, read_committed(known))
    except (TargetsError, ResultsError) as error:
        fail(str(error), code=1)
    rows = tuple(row for row in rows if not name or name in row.target.scenarios)
    if not rows:
        there = ", ".join(sorted({name for target in known for name in target.scenarios}))
        fail(f"no target speaks of {name!r}; there are {there}")
    if as_json:
        write_json(rows)
        return
    table = Table("target", "scenario", "figure", "hardware", "verdict", "why")
    for row in rows:
        table.add_row(*_cells(row))
    table_console().print(table)


def _cells(row: TargetRow) -> tuple[str, ...]:
    colour = _COLOURS.get(row.state, "dim")
    of_memory = " (from memory)" if row.target.from_memory else ""
    return (
        f"{escape(row.target.title)}{of_memory}\n[dim]{escape(row.target.id)}[/dim]",
        ", ".join(row.target.scenarios),
        escape(row.target.wanted),
        str(row.target.hardware),
        f"[{colour}]{row.state}[/{colour}]",
        escape(row.why),
    )
