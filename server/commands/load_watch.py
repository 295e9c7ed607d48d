"""What `penstock load` shows while it runs: a live table in a terminal, a line a phase elsewhere; on standard error."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from loadtest.report.live_view import LiveView
from loadtest.report.terminal import live_table
from loadtest.report.wording import number
from loadtest.results import PhaseResult, Side


def watch_for(*, is_quiet: bool) -> "QuietWatch | LinesWatch | TableWatch":
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
