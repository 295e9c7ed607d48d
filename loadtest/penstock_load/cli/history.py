"""`penstock load history`: lists the runs in a results folder with their commits."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as RichTable

from penstock.cli.terminal import fail, table_console
from penstock_load.cli.options import RESULTS, AsJson
from penstock_load.cli.output import write_json
from penstock_load.measure.history import read_history
from penstock_load.report.opening import headline
from penstock_load.report.run_series import history_table, series_of_runs

_STYLES = {"PASS": "green", "FAIL": "red"}
_SHOWN = 50


def history(
    scenario: Annotated[str, typer.Argument(help="only the runs of this scenario")] = "",
    folder: Annotated[Path, typer.Option(file_okay=False, help="results folder, with one folder per run")] = RESULTS,
    html: Annotated[
        Path | None, typer.Option("--html", dir_okay=False, help="write an HTML page with charts to this file")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List earlier runs by scenario and machine: commit, rate, latencies, errors, outcome.

    Exit code 1: there is no run to list, or the page cannot be written.
    """
    try:
        runs = read_history(folder, headline, scenario)
    except OSError as error:
        fail(f"--folder {folder}: {error.strerror or error}", code=1)
    if as_json:
        write_json(runs)
    if not runs:
        of_it = f" of {scenario}" if scenario else ""
        fail(
            f"{folder} has no run{of_it}; start one with `penstock load run`, or give another folder with --folder",
            code=1,
        )
    series = series_of_runs(runs)
    if html is not None:
        from penstock_load.report.history_page import render_history  # loads matplotlib

        try:
            html.write_text(render_history(series), encoding="utf-8")
        except OSError as error:
            fail(f"--html {html}: {error.strerror or error}", code=1)
    if as_json:
        return
    for one in series:
        table = history_table(one)
        rich_table = RichTable(*table.head, title=escape(one.title), title_justify="left")
        for row in table.rows[:_SHOWN]:
            rich_table.add_row(*(_text(cell.text) for cell in row))
        table_console().print(rich_table)
    if html is not None:
        typer.echo(f"page: {html}")


def _text(text: str) -> str:
    style = _STYLES.get(text)
    return f"[{style}]{text}[/{style}]" if style else escape(text)
