"""Options of engine calls: timeouts, the retry budget, additional headers; and running calls, which can be ended."""

import asyncio
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from penstock.protocol.call import GrpcMetadata, HttpCall
from penstock.protocol.errors import EngineUnavailable


@dataclass(frozen=True, slots=True)
class CallTimeouts:
    """Timeouts of engine calls in seconds."""

    connect_s: float = 2.0  # one connection attempt
    control_s: float = 5.0  # our probes, metadata, index, unload
    load_s: float = 600.0  # our loads
    read_s: float = 30.0  # relayed calls that only read
    call_s: float = 600.0  # relayed inferences and loads, and our inferences
    keepalive_s: float = 10.0  # silence on a gRPC connection with calls in flight, until a ping
    keepalive_timeout_s: float = 5.0  # from ping to pong


class RetryBudget:
    """Token bucket for retries of one engine, with all its replicas and both protocols. now: monotonic seconds.

    share: retries per first attempt. floor_per_s: tokens per second besides. burst: capacity, also at the start.
    """

    def __init__(self, *, share: float = 0.1, floor_per_s: float = 1.0, burst: float = 32.0) -> None:
        self._share, self._floor_per_s, self._burst = share, floor_per_s, burst
        self._saved = burst
        self._filled_at: float | None = None
        self._counted = 0
        self.calls = 0  # first attempts; incremented by the sender
        self.taken = 0
        self.refused = 0

    def take(self, now: float) -> bool:
        """Takes a token for one retry. False if there is none."""
        self._fill(now)
        if self._saved < 1.0:
            self.refused += 1
            return False
        self._saved -= 1.0
        self.taken += 1
        return True

    def take_elsewhere(self, now: float) -> bool:
        """As take(), for a retry on another replica, whose client counts it as a first attempt."""
        is_taken = self.take(now)
        self.calls -= is_taken
        return is_taken

    def _fill(self, now: float) -> None:
        if self._filled_at is not None:
            self._saved += (now - self._filled_at) * self._floor_per_s
        self._saved = min(self._saved + (self.calls - self._counted) * self._share, self._burst)
        self._filled_at, self._counted = now, self.calls


GRPC_PREFIX = "triton-grpc-protocol-"  # Triton's prefix for --grpc-restricted-protocol
_MAX_BYTES = 16_384
_LINE = re.compile(r"(?P<name>[A-Za-z0-9_.-]+):[ \t]*(?P<value>[!-~]([ -~]*[!-~])?)")


class HeaderFileError(Exception):
    """The file cannot be read or has no headers. The text has the path, never a value."""


class EngineHeaders:
    """Headers for calls to the engine, over gRPC also with Triton's prefix. They replace the client's."""

    def __init__(self, headers: tuple[tuple[str, str], ...] = ()) -> None:
        named = {name.lower(): value for name, value in headers}
        self._http = tuple((name.encode(), value.encode()) for name, value in named.items())
        self._grpc = tuple((prefix + name, value) for name, value in named.items() for prefix in ("", GRPC_PREFIX))
        self._names = frozenset(name for name, _ in self._grpc)

    @property
    def names_and_values(self) -> tuple[tuple[str, str], ...]:
        """All headers, plain and with Triton's prefix; names in lower case."""
        return self._grpc

    def over_http(self, call: HttpCall) -> HttpCall:
        """The call with these headers."""
        if not self._http:
            return call
        others = tuple(pair for pair in call.headers if pair[0].lower().decode("latin-1") not in self._names)
        return replace(call, headers=(*others, *self._http))

    def over_grpc(self, metadata: GrpcMetadata) -> GrpcMetadata:
        """The metadata with these headers."""
        if not self._grpc:
            return metadata
        return (*(pair for pair in metadata if pair[0] not in self._names), *self._grpc)

    def __repr__(self) -> str:
        return f"EngineHeaders({', '.join(name.decode() for name, _ in self._http)})"


def read_header_file(path: Path) -> tuple[tuple[str, str], ...]:
    """Reads `NAME: VALUE` lines; empty lines and lines that start with # are skipped. Raises HeaderFileError."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1).decode("ascii")
    except OSError as error:
        raise HeaderFileError(f"{path}: cannot be read ({error.strerror}); give an existing file") from error
    except UnicodeDecodeError as error:
        raise HeaderFileError(f"{path}: HTTP headers are ASCII text; write lines of NAME: VALUE") from error
    if len(text) > _MAX_BYTES:
        raise HeaderFileError(f"{path}: more than {_MAX_BYTES} bytes; write lines of NAME: VALUE")
    headers = [
        _header(line.strip(), f"{path}:{number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not headers:
        raise HeaderFileError(f"{path}: no header in it; write lines of NAME: VALUE")
    return tuple(headers)


def _header(line: str, where: str) -> tuple[str, str]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise HeaderFileError(f"{where}: not a header; write NAME: VALUE")
    return found["name"], found["value"]


class CuttableCalls:
    """Context manager for calls. `cut` cancels the tasks that are inside it; they raise EngineUnavailable."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[object]] = set()
        self._cut: dict[asyncio.Task[object], str] = {}

    def cut(self, text: str) -> None:
        """End every running call with this error."""
        for task in self._running - self._cut.keys():
            self._cut[task] = text
            task.cancel()

    def begin(self) -> None:
        """The current task can be cut until `end`."""
        self._running.add(_current_task())

    def end(self, error: BaseException | None) -> EngineUnavailable | None:
        """The error to raise instead of the cancellation; None if the task was not cancelled by `cut` alone."""
        task = _current_task()
        self._running.discard(task)
        text = self._cut.pop(task, None)
        if text is None or not isinstance(error, asyncio.CancelledError) or task.uncancel() > 0:
            return None
        return EngineUnavailable(text)

    __enter__ = begin

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        cut = self.end(error)
        if cut is not None:
            raise cut from None


def _current_task() -> "asyncio.Task[object]":
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("calls are served by tasks")
    return task
