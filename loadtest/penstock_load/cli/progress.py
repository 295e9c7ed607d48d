"""Progress of a run as JSON lines in a file, for the program that started it (`--progress FILE`)."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from penstock.cli.terminal import fail
from penstock.protocol.load_reports import LoadProgress
from penstock_load.cli.output import QuietWatch, line_of, watch_for
from penstock_load.report.document import one_line
from penstock_load.results import LiveView, PhaseResult

MAX_LINES = 20_000  # five hours; later lines are not written
EVERY_S = 1.0


def watch_or_fail(path: Path | None, *, is_quiet: bool) -> QuietWatch:
    """The watch that fits standard error, and the file if one is given; exit code 2 if it cannot be written."""
    watch = watch_for(is_quiet=is_quiet)
    if path is None:
        return watch
    try:
        return ProgressWatch(path, watch)
    except OSError as error:
        fail(f"--progress {path}: {error.strerror or error}")


class ProgressWatch(QuietWatch):
    """Writes progress to the file, at most one line per second, and forwards it to the inner watch."""

    def __init__(self, path: Path, inner: QuietWatch, now: Callable[[], float] = time.monotonic) -> None:
        """Truncates the file. Raises OSError."""
        self._file = path.open("wb", buffering=0)
        self._inner, self._now, self._began_s = inner, now, now()
        self._lines, self._next_s = 0, 0.0

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._inner.__exit__(kind, error, trace)

    def note(self, sentence: str) -> None:
        """A line."""
        self._write(LoadProgress(at_s=self._at_s, text=one_line(sentence)))
        self._inner.note(sentence)

    def phase_done(self, result: PhaseResult) -> None:
        """A line with the phase's figures."""
        self._write(LoadProgress(at_s=self._at_s, text=one_line(line_of(result))))
        self._inner.phase_done(result)

    def show(self, view: LiveView) -> None:
        """A line, once a second."""
        self._inner.show(view)
        at_s = self._at_s
        if at_s < self._next_s:
            return
        self._next_s = at_s + EVERY_S - 0.1  # views arrive every half second with some jitter
        self._write(
            LoadProgress(
                at_s=at_s,
                phase=one_line(view.phase, at_most=80),
                phase_number=view.phase_number,
                phase_count=view.phase_count,
                round=view.round,
                rounds=view.rounds,
                elapsed_s=round(view.elapsed_s, 2),
                seconds=view.seconds,
                offered_per_s=round(view.offered_per_s, 3),
                ok_per_s=round(view.rate_per_s, 3),
                p50_ms=view.p50_ms,
                p99_ms=view.p99_ms,
                slo_p99_ms=view.slo_p99_ms,
                ok=view.ok,
                refused=view.refused,
                failed=view.failed,
                timeouts=view.timeouts,
                in_flight=view.in_flight,
            )
        )

    @property
    def _at_s(self) -> float:
        return round(self._now() - self._began_s, 2)

    def _write(self, line: LoadProgress) -> None:
        """Writes a line. Errors such as a full disk are ignored."""
        self._lines += 1
        if self._lines > MAX_LINES:
            return
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError:
            self._lines = MAX_LINES
