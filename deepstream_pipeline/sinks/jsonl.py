"""objects.jsonl and events.jsonl: results of all sources as lines of JSON (SCHEMAS.md), appended.

A line is given to the kernel at once and as a whole, so a program that is killed loses none that was written, and a
disk that is full cuts none in two. A machine that loses power may lose the last seconds: nothing is synced.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from deepstream_pipeline.errors import SinkFailed
from deepstream_pipeline.sinks.folders import made_folder
from deepstream_pipeline.sinks.outage import Outage
from deepstream_pipeline.sinks.schemas import Schema, event_lines, objects_line
from deepstream_pipeline.types import FrameResult

RETRY_S = 5.0  # after a line could not be written
_TAIL_BYTES = 65_536

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class JsonlOptions:
    """folder: both files lie in it. schema: "full" or "minimal"."""

    folder: Path
    schema: Schema = Schema.FULL


class JsonlSink:
    """Appends to both files. Raises SinkFailed at once where the folder cannot be written to.

    When a file takes no more (disk full), write raises SinkFailed once, then counts the lost lines in `lost` and tries
    again every RETRY_S.
    """

    def __init__(self, options: JsonlOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._schema = Schema(options.schema)
        self._clock = clock
        folder = made_folder(options.folder)
        self._objects = LineFile(folder / "objects.jsonl")
        try:
            self._events = LineFile(folder / "events.jsonl")
        except SinkFailed:
            self._objects.close()
            raise

    @property
    def lost(self) -> int:
        """Lines that were not written."""
        return self._objects.lost + self._events.lost

    def write(self, result: FrameResult) -> None:
        """Both kinds of lines of the frame. A full objects.jsonl keeps no event from its own file."""
        now = self._clock()
        failures = [
            self._events.append(event_lines(result, self._schema), now),
            self._objects.append([objects_line(result, self._schema)], now),
        ]
        for failure in filter(None, failures):
            raise failure

    def end_source(self, source_id: str) -> None:
        """Nothing: the files are those of all sources."""

    def close(self) -> None:
        """The files are as they are; nothing waits in memory."""
        self._objects.close()
        self._events.close()


class LineFile:
    """A file that lines are appended to. A last line that is not whole, of a run that was killed, is cut off first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._outage = Outage(first_s=RETRY_S, longest_s=RETRY_S)
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._cut_partial_line()
        except OSError as error:
            self.close()
            raise SinkFailed(f"{path}: cannot be written ({error.strerror or error})") from error

    @property
    def lost(self) -> int:
        """Lines that were not written."""
        return self._outage.lost

    def append(self, lines: Sequence[bytes], now: float) -> SinkFailed | None:
        """Write the lines, each whole or not at all. The failure, where it is news."""
        if not lines:
            return None
        if self._descriptor < 0 or not self._outage.may_try(now):
            self._outage.lost += len(lines)
            return None
        try:
            self._write(b"\n".join(lines) + b"\n")
        except OSError as error:
            return self._failed(len(lines), error, now)
        lost = self._outage.worked()
        if lost is not None:
            log.warning("file is written again", path=str(self.path), lost_lines=lost)
        return None

    def close(self) -> None:
        """No more lines. Twice does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, text: bytes) -> None:
        length = os.lseek(self._descriptor, 0, os.SEEK_END)
        written = 0
        try:
            while written < len(text):
                written += os.write(self._descriptor, text[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, length)
            raise

    def _failed(self, lines: int, error: OSError, now: float) -> SinkFailed | None:
        is_news = self._outage.failed(now)
        self._outage.lost += lines
        if not is_news:
            return None
        why = error.strerror or str(error)
        return SinkFailed(f"{self.path}: {why}; lines are lost and counted, tried again every {RETRY_S:g} s")

    def _cut_partial_line(self) -> None:
        length = os.lseek(self._descriptor, 0, os.SEEK_END)
        whole = _length_of_whole_lines(self._descriptor, length)
        if whole < length:
            os.ftruncate(self._descriptor, whole)
            log.info("a line that was not whole is cut off", path=str(self.path), bytes=length - whole)


def _length_of_whole_lines(descriptor: int, length: int) -> int:
    end = length
    while end > 0:
        begin = max(0, end - _TAIL_BYTES)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
