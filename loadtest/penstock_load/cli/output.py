"""Output of `penstock load`: progress on standard error, then reports, tables or JSON, and the exit code."""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from penstock.cli.terminal import fail, table_console
from penstock_load.main import SessionError, judged, run_session, run_streams
from penstock_load.measure.compare import RunComparison, compare
from penstock_load.measure.history import last_run, summary_of, write_summary
from penstock_load.measure.run_folder import RunFolderError, read_run_folder, write_run
from penstock_load.phase_runner import RunOptions
from penstock_load.report.comparison import LastRun
from penstock_load.report.document import number
from penstock_load.report.figures import neighbours
from penstock_load.report.opening import headline
from penstock_load.report.pages import write_html, write_markdown
from penstock_load.report.terminal import figures_table, live_table, verdict_table
from penstock_load.results import LiveView, PhaseResult, Run, Side
from penstock_load.targets import Target
from penstock_load.verdict import exit_code


def watch_for(*, is_quiet: bool) -> "QuietWatch":
    """The watch that fits standard error."""
    if is_quiet:
        return QuietWatch()
    console = Console(stderr=True, highlight=False)
    return TableWatch(console) if console.is_terminal else LinesWatch(console)


class QuietWatch:
    """Says nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def note(self, sentence: str) -> None:
        """Not said."""

    def show(self, view: LiveView) -> None:
        """Not shown."""

    def phase_done(self, result: PhaseResult) -> None:
        """Not said."""


class LinesWatch(QuietWatch):
    """A line for each note and each phase that has ended."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, sentence: str) -> None:
        """One line."""
        self._line(sentence)

    def phase_done(self, result: PhaseResult) -> None:
        """The phase's figures in one line."""
        self._line(line_of(result))

    def _line(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)


class TableWatch(LinesWatch):
    """The same lines, above a table of the phase that runs."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, view: LiveView) -> None:
        """Draws the table anew."""
        self._live.update(live_table(view), refresh=True)


def line_of(result: PhaseResult) -> str:
    """A phase in one line of a log."""
    asked = result.all
    side = " beside" if result.side is Side.BESIDE else ""
    offered = f"{number(result.offered_per_s)}/s offered, " if result.is_open_loop else ""
    bad = [
        f"{count} {word}"
        for count, word in (
            (asked.refused, "refused"),
            (asked.failed, "failed"),
            (asked.timeouts, "timed out"),
            (asked.not_sent, "not sent"),
        )
        if count
    ]
    p50, p99 = number(asked.latency.p50), number(asked.latency.p99)
    latency = f"p50 {p50} ms, p99 {p99} ms" if asked.latency.count else "no answer"
    complaint = f"; {result.health.complaint}" if result.health.complaint else ""
    rate = f"{offered}{number(result.ok_per_s)}/s answered"
    return f"round {result.round} {result.phase}{side}: {', '.join([rate, latency, *bad])}{complaint}"


HTML, MARKDOWN = "report.html", "report.md"


def end_run(run: Run, folder: Path, *, as_json: bool, code: int) -> None:
    """run.json and the reports in the folder, and the verdict on standard output.

    Exit code 1 where nothing can be written, 130 where Ctrl-C comes meanwhile.
    """
    try:
        write_run(folder, run)
        write_summary(folder, summary_of(run, folder.name, headline(run), neighbours(run)))
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
        console.print(verdict_table(run.verdicts))
    for complaint in run.complaints:
        console.print(f"[red]{escape(complaint)}[/red]", soft_wrap=True)
    console.print(escape(headline(run)), soft_wrap=True)
    if others := neighbours(run):
        console.print(f"[yellow]{escape(others)}[/yellow]", soft_wrap=True)
    console.print(f"report: {escape(str(path))}", soft_wrap=True)


def give_up(sentence: str, *, code: int, as_json: bool) -> NoReturn:
    """Ends the command where there is no verdict: a sentence on standard error, and for programs an object."""
    if as_json:
        write_json({"exit_code": code, "error": sentence})
    fail(sentence, code=code)


def write_reports(run: Run, folder: Path) -> Path:
    """report.html and report.md in the folder, compared with the last run beside it; the path of the former."""
    last = compared_with_last(run, folder)
    write_html(run, folder / HTML, last)
    write_markdown(run, folder / MARKDOWN, last)
    return folder / HTML


def compared_with_last(run: Run, folder: Path) -> LastRun | None:
    """The last run of its kind beside the folder, compared; None without one. Unreadable records are passed over."""
    last = last_run(folder.resolve(), run)
    if last is None:
        return None
    this = read_run_folder(folder)
    try:
        return LastRun(last.run.began_at, compare(last, this))
    except RunFolderError:
        without = (replace(one, records_path=None) for one in (last, this))
        return LastRun(last.run.began_at, compare(*without))


def say_comparison(comparison: RunComparison, *, as_json: bool) -> None:
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
    for change in comparison.changes:
        console.print(escape(change), soft_wrap=True)
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


T = TypeVar("T")


def run_to_its_end(order: RunOptions, targets: Sequence[Target], watch: QuietWatch, *, as_json: bool) -> None:
    """Runs, judges, reports, and ends the command with its exit code."""
    with watch:
        begin = run_streams if order.scenario.is_video else run_session
        run = composed(order, begin(order, watch), as_json=as_json)
    run = judged(run, targets)
    code = exit_code(run.verdicts, run.complaints)
    end_run(run, order.folder, as_json=as_json, code=code)
    raise typer.Exit(code)


def composed(order: RunOptions, session: Coroutine[Any, Any, T], *, as_json: bool) -> T:
    """What the session comes to; exit code 1 and one sentence where it cannot begin or cannot write.

    Ctrl-C and SIGTERM end it with a report of what it had; before the first phase, or twice, without one.
    """
    try:
        return asyncio.run(_stopped_by_sigterm(session))
    except SessionError as error:
        _remove_if_empty(order)
        give_up(str(error), code=1, as_json=as_json)
    except OSError as error:
        sentence = f"{order.folder}: the records could not be written: {error.strerror or error}"
        give_up(sentence, code=1, as_json=as_json)
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        _remove_if_empty(order)
        left = f"the requests so far are in {order.folder}, without a report"
        sentence = f"stopped: {left}" if order.folder.exists() else "stopped before the first phase"
        give_up(sentence, code=130 if isinstance(stop, KeyboardInterrupt) else 143, as_json=as_json)


async def _stopped_by_sigterm(session: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run does with Ctrl-C."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "this is a coroutine"
    loop.add_signal_handler(signal.SIGTERM, task.cancel, "SIGTERM")
    try:
        return await session
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _remove_if_empty(order: RunOptions) -> None:
    """A folder in which nothing was measured is of no use."""
    for path in order.folder.glob("records.jsonl"):
        if path.stat().st_size == 0:
            path.unlink()
    if not any(order.folder.iterdir()):
        order.folder.rmdir()
