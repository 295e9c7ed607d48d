"""objects.jsonl and events.jsonl: results as lines of JSON, and the folder of each source."""

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import Field

from penstock_video.backoff import Backoff, Outage
from penstock_video.errors import SinkFailed
from penstock_video.sinks.schemas import Schema, event_lines, objects_line
from penstock_video.types import FrameResult

_SOURCE_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,64}")


def made_folder(folder: Path) -> Path:
    """The folder, created if missing, tested to be writable. Raises SinkFailed with its name."""
    probe = folder / ".penstock-writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
        message = f"{folder}: cannot be written to ({why}); name a folder that this user may write to"
        raise SinkFailed(message) from error
    return folder


class SourceFolders:
    """Output folder of each source: its own, or the folder itself for the only source at start (is_single)."""

    def __init__(self, folder: Path, *, is_single: bool) -> None:
        self.folder = folder
        self._has_room_for_one = is_single
        self._single = ""

    def of(self, source_id: str) -> Path:
        """The source's folder, which may not exist yet. Raises SinkFailed if the ID is no folder name."""
        if not _SOURCE_ID.fullmatch(source_id):
            raise SinkFailed(
                f"source id {source_id!r} cannot be a folder's name: letters, digits, . _ - and no dots alone"
            )
        if self._has_room_for_one:
            self._has_room_for_one, self._single = False, source_id
        return self.folder if source_id == self._single else self.folder / source_id


def end_all(source_ids: Iterable[str], end: Callable[[str], None]) -> None:
    """Ends the source of each ID. Raises SinkFailed afterwards, with the text of every failure."""
    failures = []
    for source_id in list(source_ids):
        try:
            end(source_id)
        except SinkFailed as failure:
            failures.append(failure.message)
    if failures:
        raise SinkFailed("; ".join(failures))


RETRY_S = 5.0  # after a line could not be written
_TAIL_BYTES = 65_536

log = structlog.get_logger(component="video")


Folder = Annotated[Path, Field(description="give a folder, or --out for all sinks")]


@dataclass(frozen=True, slots=True)
class JsonlOptions:
    """folder: of both files. schema: "full" or "minimal"."""

    folder: Folder
    schema: Schema = Schema.FULL


class JsonlSink:
    """Appends to both files. Raises SinkFailed at once if the folder is not writable. On a full disk, write raises
    SinkFailed once, then counts lost lines in `lost` and retries every RETRY_S."""

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
        """Writes the frame's lines. Failures of one file do not affect the other."""
        now = self._clock()
        failures = [
            self._events.append(event_lines(result, self._schema), now),
            self._objects.append([objects_line(result, self._schema)], now),
        ]
        for failure in filter(None, failures):
            raise failure

    def end_source(self, source_id: str) -> None:
        """Does nothing: all sources share the files."""

    def close(self) -> None:
        """Closes the files; nothing is buffered."""
        self._objects.close()
        self._events.close()


class LineFile:
    """A file to append lines to. An incomplete last line of an earlier run is truncated first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._outage = Outage(Backoff(RETRY_S, RETRY_S))
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
        """Writes the lines, each whole or not at all. Returns a new failure."""
        if not lines:
            return None
        if self._descriptor < 0 or (self._outage.is_open and not self._outage.may_try(now)):
            self._outage.lost += len(lines)
            return None
        try:
            self._write(b"\n".join(lines) + b"\n")
        except OSError as error:
            return self._failed(len(lines), error, now)
        if self._outage.is_open:
            log.warning("file is written again", path=str(self.path), lost_lines=self._outage.worked())
        return None

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
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
