"""Parses Triton's output into entries of our log."""

import contextlib
import json
import logging
import re
from collections import deque
from dataclasses import dataclass
from typing import Protocol

MAX_LINE_BYTES = 64 * 1024
MAX_MESSAGE_CHARS = 4096
MAX_BLOCK_LINES = 100
MAX_ENTRIES_PER_S = 500

_GLOG = re.compile(r"(?P<level>[IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ (?P<source>[^\]\s]+:\d+)\] ?(?P<message>.*)")
_PROTOBUF = re.compile(r"\[libprotobuf (?P<level>\w+) (?:.*/)?(?P<source>[^/\s]+:\d+)\] (?P<message>.*)")
_SIGNAL = re.compile(r"Signal \((\d+)\) received\.")
_TRACEBACK = "Traceback (most recent call last):"
_LEVEL_OF = {
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "F": logging.CRITICAL,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
_EXPECTED_SIGNALS = {"2", "15"}
# Triton logs these as errors and warnings on every machine without a GPU.
_WITHOUT_GPU = (
    "CUDA memory pool disabled",
    "CudaDriverHelper has not been initialized",
    "DCGM unable to start",
    "Error: Failed to initialize NVML",
    "Unable to allocate pinned system memory",
)
# Triton's HTTP library logs this for each Unix socket, because the option is for TCP.
_ON_UNIX_SOCKETS = "NODELAY NOT SUPPORTED"
# The server's own messages about its start, instances and end; not those about models.
_CHATTER = re.compile(r"(?!model_lifecycle\.)\w+\.cc:\d+")
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Emit(Protocol):
    """Writes one entry to our log. level: logging's number. structlog's `logger.log` is one."""

    def __call__(self, level: int, event: str, /, **fields: str | int) -> object: ...


@dataclass(frozen=True, slots=True)
class LogEntry:
    """level: logging's number. source: "file.cc:12", or empty. message: one printable line."""

    level: int
    source: str
    message: str


@dataclass(slots=True)
class _Block:
    """Lines of one entry: a traceback, or the text below a header without quotes."""

    level: int
    source: str
    lines: list[str]
    is_traceback: bool


class LogAssembler:
    """Converts Triton's output into entries. Without has_gpu, messages about a missing GPU have debug level.

    Handles glog headers with a JSON string or with more lines below, start-up tables (debug level), Python tracebacks
    (one entry), and models' own output.
    """

    def __init__(self, *, has_gpu: bool) -> None:
        self._has_gpu = has_gpu
        self._partial = bytearray()
        self._skipped_bytes = 0
        self._block: _Block | None = None

    @property
    def is_pending(self) -> bool:
        """Whether flush() would return an entry."""
        return bool(self._partial) or self._block is not None

    def feed(self, chunk: bytes) -> list[LogEntry]:
        """The entries that this piece completes."""
        entries: list[LogEntry] = []
        *complete, rest = chunk.split(b"\n")
        for piece in complete:
            self._append(piece)
            entries += self._line(self._take_line())
        self._append(rest)
        return entries

    def flush(self) -> list[LogEntry]:
        """The incomplete entry. Call it when no output came for a while, and at the end."""
        entries = self._line(self._take_line()) if self._partial else []
        return entries + self._end_block()

    def _append(self, piece: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._partial)
        self._partial += piece[:room]
        self._skipped_bytes += max(0, len(piece) - room)

    def _take_line(self) -> str:
        line = self._partial.decode("utf-8", "replace").rstrip("\r")
        if self._skipped_bytes:
            line += f" … (+{self._skipped_bytes} bytes)"
        self._partial.clear()
        self._skipped_bytes = 0
        return line

    def _line(self, line: str) -> list[LogEntry]:
        header = _GLOG.search(line) or _PROTOBUF.match(line)
        if header is not None:
            before = self._end_block() + self._unheaded(line[: header.start()])  # printed without a newline
            return before + self._headed(header)
        if self._block is not None and self._continues(line):
            self._block.lines.append(line)
            return self._end_block() if len(self._block.lines) >= MAX_BLOCK_LINES else []
        if self._block is not None and self._block.is_traceback:
            self._block.lines.append(line)  # the exception itself closes its traceback
            return self._end_block()
        entries = self._end_block()
        if line.endswith(_TRACEBACK):
            self._block = _Block(logging.ERROR, "", [line], is_traceback=True)
            return entries
        return entries + self._unheaded(line)

    def _headed(self, header: re.Match[str]) -> list[LogEntry]:
        level = _LEVEL_OF.get(header["level"], logging.INFO)
        message = header["message"].strip()
        if not message.startswith('"'):
            self._block = _Block(level, header["source"], [message], is_traceback=False)
            return []
        unquoted, rest = _unquote(message)
        entry = LogEntry(self._level(level, unquoted), header["source"], one_line(unquoted))
        return [entry, *self._unheaded(rest)]

    def _unheaded(self, line: str) -> list[LogEntry]:
        if not line.strip():
            return []
        if line.startswith(("+-", "| ")):
            return [LogEntry(logging.DEBUG, "", one_line(line))]
        signal = _SIGNAL.match(line)
        level = logging.ERROR if signal is not None and signal[1] not in _EXPECTED_SIGNALS else logging.INFO
        return [LogEntry(self._level(level, line), "", one_line(line))]

    def _level(self, level: int, message: str) -> int:
        is_expected = _ON_UNIX_SOCKETS in message or (not self._has_gpu and message.startswith(_WITHOUT_GPU))
        return logging.DEBUG if is_expected else level

    def _continues(self, line: str) -> bool:
        return line.startswith((" ", "\t")) or (
            self._block is not None and not self._block.is_traceback and line.strip() in ("", "At:")
        )

    def _end_block(self) -> list[LogEntry]:
        block, self._block = self._block, None
        if block is None:
            return []
        message = one_line("\n".join(block.lines))
        return [LogEntry(block.level, block.source, message)] if message else []


def _shown_level(entry: LogEntry) -> int:
    """DEBUG for the server's own INFO entries, else the entry's level."""
    return logging.DEBUG if entry.level == logging.INFO and _CHATTER.fullmatch(entry.source) else entry.level


def _unquote(message: str) -> tuple[str, str]:
    """The text of the JSON string, and a model's output between it and Triton's newline."""
    try:
        text, end = json.JSONDecoder().raw_decode(message)
    except ValueError:
        return message.strip('"'), ""  # truncated at MAX_LINE_BYTES
    return str(text), message[end:]


def one_line(text: str) -> str:
    """The text as one bounded line: lines joined by " | ", without colours, control characters escaped."""
    lines = (line.strip() for line in _ANSI.sub("", text).splitlines())
    joined = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], " | ".join(line for line in lines if line))
    if len(joined) <= MAX_MESSAGE_CHARS:
        return joined
    return f"{joined[:MAX_MESSAGE_CHARS]} … (+{len(joined) - MAX_MESSAGE_CHARS} characters)"


class LogSink:
    """Writes Triton's output to our log, at most MAX_ENTRIES_PER_S, and remembers the last errors."""

    def __init__(self, emit: Emit, *, has_gpu: bool, remembered: int = 5) -> None:
        self._emit = emit
        self._assembler = LogAssembler(has_gpu=has_gpu)
        self._errors: deque[str] = deque(maxlen=remembered)
        self._last_line = ""
        self._second = -1
        self._in_second = 0
        self._dropped = 0

    @property
    def is_pending(self) -> bool:
        return self._assembler.is_pending

    def feed(self, chunk: bytes, now: float) -> None:
        self._take(self._assembler.feed(chunk), now)

    def flush(self, now: float) -> None:
        self._take(self._assembler.flush(), now)
        self._report_dropped()

    def last_errors(self) -> str:
        """The last errors, oldest first; the last line if there are none; empty without output."""
        distinct = list(dict.fromkeys(self._errors))
        return " | ".join(distinct) if distinct else self._last_line

    def _take(self, entries: list[LogEntry], now: float) -> None:
        for entry in entries:
            if entry.level >= logging.ERROR:
                self._errors.append(entry.message)
            if entry.level > logging.DEBUG:
                self._last_line = entry.message
            self._emit_within_rate(entry, now)

    def _emit_within_rate(self, entry: LogEntry, now: float) -> None:
        if int(now) != self._second:
            self._report_dropped()
            self._second, self._in_second = int(now), 0
        self._in_second += 1
        if self._in_second > MAX_ENTRIES_PER_S:
            self._dropped += 1
        elif entry.source:
            self._write(_shown_level(entry), entry.message, source=entry.source)
        else:
            self._write(entry.level, entry.message)

    def _report_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._write(logging.WARNING, "Triton writes too fast; log lines dropped", dropped=dropped)

    def _write(self, level: int, message: str, **fields: str | int) -> None:
        """Ignores failures of our own log, such as a closed pipe, to continue reading Triton's output."""
        with contextlib.suppress(OSError, ValueError):
            self._emit(level, message, **fields)
