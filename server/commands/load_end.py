"""What `penstock load` leaves at the end: files in the run's folder, tables or JSON on standard output."""

import sys
from pathlib import Path
from typing import NoReturn

import msgspec
from rich.markup import escape
from rich.table import Table

from loadtest.measure.compare import Comparison
from loadtest.measure.run_folder import write_run
from loadtest.report.html import write_html
from loadtest.report.markdown import write_markdown
from loadtest.report.neighbours import neighbours
from loadtest.report.terminal import figures_table, headline, verdict_table
from loadtest.results import Run
from server.commands.terminal import fail, table_console

HTML, MARKDOWN = "report.html", "report.md"


def end_run(run: Run, folder: Path, *, as_json: bool, code: int) -> None:
    """run.json and the reports in the folder, and the verdict on standard output.

    Exit code 1 where nothing can be written, 130 where Ctrl-C comes meanwhile.
    """
    try:
        write_run(folder, run)
        path = write_reports(run, folder)
    except OSError as error:
        give_up(f"{folder}: the report could not be written: {error.strerror or error}", code=1, as_json=as_json)
    except KeyboardInterrupt:
        give_up(f"stopped: penstock load report {folder} writes the report again", code=130, as_json=as_json)
    if as_json:
        write_json({"exit_code": code, "folder": str(folder), **_in_short(run)})
        return
    console = table_console()
    if run.phases:
        console.print(figures_table(run))
    if run.verdicts:
        console.print(verdict_table(run))
    for complaint in run.complaints:
        console.print(f"[red]{escape(complaint)}[/red]", soft_wrap=True)
    if others := neighbours(run):
        console.print(f"[yellow]{escape(others)}[/yellow]", soft_wrap=True)
    console.print(escape(headline(run)), soft_wrap=True)
    console.print(f"report: {escape(str(path))}", soft_wrap=True)


def give_up(sentence: str, *, code: int, as_json: bool) -> NoReturn:
    """Ends the command where there is no verdict: a sentence on standard error, and for programs an object."""
    if as_json:
        write_json({"exit_code": code, "error": sentence})
    fail(sentence, code=code)


def write_reports(run: Run, folder: Path) -> Path:
    """report.html and report.md in the folder; the path of the former."""
    write_html(run, folder / HTML)
    write_markdown(run, folder / MARKDOWN)
    return folder / HTML


def say_comparison(comparison: Comparison, *, as_json: bool) -> None:
    """A row a figure: A, B, the ratio with its interval, the sentence."""
    if as_json:
        write_json(msgspec.to_builtins(comparison))
        return
    console = table_console()
    console.print(f"A: {escape(comparison.a)}   B: {escape(comparison.b)}", soft_wrap=True)
    table = Table("figure", "A", "B", "what that means")
    for row in comparison.rows:
        name = f"{row.measure} [{row.unit}]" if row.unit else row.measure
        table.add_row(escape(name), f"{row.a:.4g}", f"{row.b:.4g}", escape(row.sentence))
    console.print(table)
    if any(row.low is not None for row in comparison.rows):
        console.print("[dim]figures are of all rounds together, not the medians that a verdict judges[/dim]")
    for warning in comparison.warnings:
        console.print(f"[yellow]{escape(warning)}[/yellow]", soft_wrap=True)


def write_json(content: object) -> None:
    """One line on standard output."""
    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
    sys.stdout.flush()


def _in_short(run: Run) -> dict[str, object]:
    """The run without its seconds and histograms, which are in run.json."""
    wanted = ("scenario", "target_url", "server", "verdicts", "measurements", "reloads", "complaints")
    return {name: msgspec.to_builtins(getattr(run, name)) for name in wanted} | {"neighbours": neighbours(run)}
