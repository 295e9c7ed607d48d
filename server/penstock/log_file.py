"""Writes and reads the log of a stack: JSON lines that its processes append to numbered files in one folder.

Each line is one write, so lines of several processes do not mix. When a file is full, one process creates the file with
the next number, and the others switch to it. Only the last two files are stored. Lines that cannot be written are
dropped.
"""

import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

FOLDER = "logs"  # in a stack's run directory
MAX_FILE_BYTES = 4 << 20
MAX_LINE_BYTES = 16 << 10
_HEAD_LENGTH, _TAIL_LENGTH = 500, 1500  # characters of a longer value that are stored: a traceback ends with the error
LEVELS = ("debug", "info", "warning", "error", "critical")
_NAME = re.compile(r"([1-9][0-9]{0,17})\.jsonl")


class LogLine(msgspec.Struct, frozen=True):
    """One line of the log.

    level: debug, info, warning, error or critical. time: ISO 8601 in UTC. process: role of the process, such as
    `gateway` or `worker 1`. fields: all other values of the line, as text.
    """

    level: str
    time: str
    process: str
    pid: int
    component: str
    event: str
    fields: dict[str, str] = {}


_DECODER = msgspec.json.Decoder(LogLine)
_HEADS = {  # prefixes of lines at a level or above: other lines are skipped without decoding
    least: tuple(b'{"level":"%b"' % level.encode() for level in LEVELS[index:]) for index, least in enumerate(LEVELS)
}


class LogFile:
    """A structlog processor that appends each line to the folder's newest file and passes it on unchanged."""

    def __init__(self, folder: Path, process: str, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder, self._process, self._max_file_bytes = folder, process, max_file_bytes
        self._number, self._file = 0, -1
        self._is_torn = False
        self._lock = threading.Lock()

    def __call__(self, _: object, __: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        with suppress(OSError), self._lock:
            self._append(_encode(entry, self._process))
        return entry

    def _append(self, line: bytes) -> None:
        file = self._newest()
        begin = b"\n" if self._is_torn else b""  # ends an earlier line that a full disk truncated
        written = os.write(file, begin + line)
        self._is_torn = written < len(begin) + len(line)

    def _newest(self) -> int:
        """The file to append to. Creates the next one if it is full."""
        status = os.fstat(self._file) if self._file >= 0 else None
        if status is not None and status.st_nlink and not self._path(self._number + 1).exists():
            if status.st_size < self._max_file_bytes:
                return self._file
            self._open(self._number + 1)
            _path_of(self._folder, self._number - 2).unlink(missing_ok=True)
            return self._file
        self._open(max(_numbers(self._folder), default=1))
        return self._file

    def _open(self, number: int) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path(number), flags, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._number, self._file = number, file

    def _path(self, number: int) -> Path:
        return _path_of(self._folder, number)


def _path_of(folder: Path, number: int) -> Path:
    return folder / f"{number}.jsonl"


def _numbers(folder: Path) -> list[int]:
    return sorted(int(found[1]) for name in os.listdir(folder) if (found := _NAME.fullmatch(name)))


def _encode(entry: MutableMapping[str, Any], process: str) -> bytes:
    """The encoded line. Values are shortened so that it has at most MAX_LINE_BYTES."""
    others = {key: _shortened(value) for key, value in entry.items() if key not in _HEAD}
    line = LogLine(
        str(entry.get("level", "info")),
        str(entry.get("timestamp", "")),
        process,
        os.getpid(),
        str(entry.get("component", "")),
        _shortened(entry.get("event", "")),
        others,
    )
    encoded = msgspec.json.encode(line)
    if len(encoded) >= MAX_LINE_BYTES:
        encoded = msgspec.json.encode(msgspec.structs.replace(line, fields={"shortened": f"{len(encoded)} bytes"}))
    return encoded + b"\n"


_HEAD = frozenset(("level", "timestamp", "component", "event"))


def _shortened(value: object) -> str:
    text = str(value).encode(errors="replace").decode()  # file names may not be valid UTF-8
    if len(text) <= _HEAD_LENGTH + _TAIL_LENGTH:
        return text
    return f"{text[:_HEAD_LENGTH]}…{text[-_TAIL_LENGTH:]}"


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Selects lines. level: least severe level. since: earliest time, ISO 8601 in UTC. text: case-insensitive."""

    level: str = "debug"
    since: str = ""
    text: str = ""

    def lines(self, encoded: Iterable[bytes]) -> Iterator[LogLine]:
        """The matching lines in the same order. Skips incomplete lines."""
        heads, wanted = _HEADS[self.level], self.text.casefold()
        for raw in encoded:
            if not raw.startswith(heads):
                continue
            with suppress(msgspec.DecodeError):
                line = _DECODER.decode(raw)
                if line.time >= self.since and (not wanted or wanted in _searched(line)):
                    yield line


def _searched(line: LogLine) -> str:
    fields = " ".join(f"{key}={value}" for key, value in line.fields.items())
    return f"{line.process} {line.component}: {line.event} {fields}".casefold()


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in the log: a file's number and an offset in bytes. As text: NUMBER-OFFSET."""

    number: int = 0
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> "LogPosition":
        """Raises ValueError."""
        if re.fullmatch(r"[0-9]{1,18}-[0-9]{1,18}", text) is None:
            raise ValueError(f"{text[:40]!r} is not a position in the log; use `next` of an earlier response")
        number, _, offset = text.partition("-")
        return cls(int(number), int(offset))

    def __str__(self) -> str:
        return f"{self.number}-{self.offset}"


@dataclass(frozen=True, slots=True)
class LogPage:
    """Lines, oldest first, and the position after them."""

    lines: tuple[LogLine, ...]
    next: LogPosition


def newest_lines(folder: Path, wanted: LogFilter, limit: int) -> LogPage:
    """The last `limit` matching lines. Empty if there is no log."""
    pieces = _complete_lines(folder, LogPosition())
    end = LogPosition()
    found: deque[LogLine] = deque(maxlen=limit)
    for number, offset, lines in reversed(pieces):
        end = max(end, LogPosition(number, offset), key=lambda at: (at.number, at.offset))
        found.extendleft(islice(wanted.lines(reversed(lines)), limit - len(found)))
    return LogPage(tuple(found), end)


def lines_after(folder: Path, position: LogPosition, wanted: LogFilter, limit: int) -> LogPage:
    """The first `limit` matching lines after the position; from the oldest line if the position's file was removed."""
    found: list[LogLine] = []
    at = position
    for number, offset, lines in _complete_lines(folder, position):
        begin = offset - sum(len(line) + 1 for line in lines)
        for raw in lines:
            begin += len(raw) + 1
            found += wanted.lines((raw,))
            if len(found) == limit:
                return LogPage(tuple(found), LogPosition(number, begin))
        at = LogPosition(number, offset)
    return LogPage(tuple(found), at)


def _complete_lines(folder: Path, after: LogPosition) -> list[tuple[int, int, list[bytes]]]:
    """Per file: number, offset after its last complete line, and complete lines after the position."""
    found = []
    try:
        numbers = _numbers(folder)
    except OSError:
        return []
    if after.number > max(numbers, default=0):  # a position in the log of an earlier stack
        after = LogPosition()
    for number in numbers:
        if number < after.number:
            continue
        begin = after.offset if number == after.number else 0
        with suppress(OSError), open(_path_of(folder, number), "rb") as file:  # the file may have been removed
            begin = begin if begin <= os.fstat(file.fileno()).st_size else 0
            file.seek(begin)
            text = file.read(MAX_FILE_BYTES + MAX_LINE_BYTES * 8)
            complete = text[: text.rfind(b"\n") + 1]
            found.append((number, begin + len(complete), complete.split(b"\n")[:-1]))
    return found
