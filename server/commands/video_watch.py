"""What `penstock video run` shows while it runs: a live table in a terminal, a line every few seconds elsewhere."""

import io
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from deepstream_pipeline.types import SourceStatistics
from server.commands.terminal import one_line
from server.commands.video_rows import line_of, record_of
from server.commands.video_table import live_table

LINE_EVERY_S = 5.0


def watch_for(*, is_json: bool, has_progress: bool) -> "QuietWatch":
    """The watch that fits: for programs on standard output, for people on standard error."""
    if is_json:
        return JsonWatch(has_progress=has_progress)
    if not has_progress:
        return QuietWatch()
    console = Console(stderr=True, highlight=False)
    return TableWatch(console) if console.is_terminal else LinesWatch(console)


class QuietWatch:
    """Says nothing but notes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._said_at = self._began

    def __enter__(self) -> Self:
        self._began = self._said_at = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    @property
    def seconds(self) -> float:
        """Since the block began."""
        return time.monotonic() - self._began

    @property
    def log_stream(self) -> TextIO:
        """Where log lines go."""
        return sys.stderr

    def note(self, sentence: str) -> None:
        """One line on standard error."""
        sys.stderr.write(one_line(sentence) + "\n")

    def begin(self, sentence: str, record: dict[str, object]) -> None:
        """That it runs now: the sentence for people, the record for programs."""
        self.note(sentence)

    def show(self, sources: Sequence[SourceStatistics]) -> None:
        """Not shown."""

    def _is_time(self) -> bool:
        """Whether a line is due."""
        now = time.monotonic()
        if now - self._said_at < LINE_EVERY_S:
            return False
        self._said_at = now
        return True


class JsonWatch(QuietWatch):
    """For programs: a JSON line at the start and, with has_progress, every few seconds, on standard output."""

    def __init__(self, *, has_progress: bool) -> None:
        super().__init__()
        self._has_progress = has_progress

    def note(self, sentence: str) -> None:
        """Is for people."""

    def begin(self, sentence: str, record: dict[str, object]) -> None:
        """The record."""
        write_json(record)

    def show(self, sources: Sequence[SourceStatistics]) -> None:
        """Each source's figures."""
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
        """One line."""
        self._console.print(Text(one_line(sentence)), soft_wrap=True)

    def show(self, sources: Sequence[SourceStatistics]) -> None:
        """The sums."""
        if self._is_time():
            self.note(line_of(sources, self.seconds))


class TableWatch(LinesWatch):
    """A table that is drawn anew, a row a source; log lines scroll above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    @property
    def log_stream(self) -> TextIO:
        """Above the table."""
        return _AboveTable(self._console)

    def show(self, sources: Sequence[SourceStatistics]) -> None:
        """Draws the table."""
        self._live.update(live_table(sources, self._console.width), refresh=True)


class _AboveTable(io.StringIO):
    """A stream whose lines the console prints above what it draws."""

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
