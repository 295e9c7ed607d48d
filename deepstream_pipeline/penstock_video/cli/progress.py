"""Progress output of `penstock video run`: a live table in a terminal, otherwise a line every few seconds."""

import io
import sys
import time
from collections.abc import Sequence
from typing import NoReturn, Self, TextIO

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.cli.terminal import Failed, fail, one_line, print_failure
from penstock_video.cli.table import line_of, live_table, record_of
from penstock_video.interfaces import SourceStatistics
from penstock_video.settings.document import InvalidSettings

LINE_EVERY_S = 5.0


def watch_for(*, is_json: bool, has_progress: bool) -> "QuietWatch":
    """The watch for JSON, a terminal or a log."""
    if is_json:
        return JsonWatch(has_progress=has_progress)
    if not has_progress:
        return QuietWatch()
    console = Console(stderr=True, highlight=False)
    return TableWatch(console) if console.is_terminal else LinesWatch(console)


class QuietWatch:
    """Prints only notes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._printed_at = self._began

    def __enter__(self) -> Self:
        self._began = self._printed_at = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        return

    @property
    def seconds(self) -> float:
        """Seconds since the block began."""
        return time.monotonic() - self._began

    @property
    def log_stream(self) -> TextIO:
        """The stream for log lines."""
        return sys.stderr

    def note(self, sentence: str) -> None:
        """Prints a line on standard error."""
        sys.stderr.write(one_line(sentence) + "\n")

    def begin(self, sentence: str, record: dict[str, object]) -> None:
        """Reports the start: a sentence, or the JSON record."""
        self.note(sentence)

    def show(self, sources: Sequence[SourceStatistics]) -> None:
        """Shows nothing."""

    def _is_time(self) -> bool:
        """Whether a line is due."""
        now = time.monotonic()
        if now - self._printed_at < LINE_EVERY_S:
            return False
        self._printed_at = now
        return True


class JsonWatch(QuietWatch):
    """A JSON line on standard output at the start and, with has_progress, every few seconds."""

    def __init__(self, *, has_progress: bool) -> None:
        super().__init__()
        self._has_progress = has_progress

    def note(self, sentence: str) -> None:
        """Not in JSON."""

    def begin(self, sentence: str, record: dict[str, object]) -> None:
        """Prints the record."""
        write_json(record)

    def show(self, sources: Sequence[SourceStatistics]) -> None:
        """Prints each source's figures."""
        if self._has_progress and self._is_time():
            write_json(
                {"kind": "progress", "seconds": round(self.seconds, 3), "sources": list(map(record_of, sources))}
            )


class LinesWatch(QuietWatch):
    """A line every few seconds on standard error."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def note(self, sentence: str) -> None:
        """Prints one line."""
        self._console.print(Text(one_line(sentence)), soft_wrap=True)

    def show(self, sources: Sequence[SourceStatistics]) -> None:
        """Prints the sums."""
        if self._is_time():
            self.note(line_of(sources, self.seconds))


class TableWatch(LinesWatch):
    """A live table with a row per source; log lines scroll above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @property
    def log_stream(self) -> TextIO:
        """A stream above the table."""
        return _AboveTable(self._console)

    def show(self, sources: Sequence[SourceStatistics]) -> None:
        """Draws the table."""
        self._live.update(live_table(sources, self._console.width), refresh=True)


class _AboveTable(io.StringIO):
    """A stream whose lines the console prints above the table."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def write(self, text: str) -> int:
        if line := text.rstrip("\n"):
            self._console.print(Text(line), soft_wrap=True)
        return len(text)


def write_json(content: object) -> None:
    """One line on standard output."""
    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
    sys.stdout.flush()


def refuse_settings(refused: InvalidSettings, *, as_json: bool, code: int = 2) -> NoReturn:
    """Ends the command. as_json: prints the faults as JSON on standard output."""
    if as_json:
        faults = [{"where": fault.where, "text": fault.text} for fault in refused.complaints]
        write_json({"is_valid": False, "exit_code": code, "faults": faults})
        raise typer.Exit(code)
    lines = [one_line(str(fault)) for fault in refused.complaints]
    if len(lines) == 1:
        fail(lines[0], code=code)
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    print_failure(f"{len(lines)} faults in the settings")
    raise Failed(f"{lines[0]} (and {len(lines) - 1} more)", code)
