"""Options of calls to an engine: timeouts, the retry budget, and headers that are added to every call."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.protocol.call import GrpcMetadata, HttpCall


@dataclass(frozen=True, slots=True)
class CallTimeouts:
    """Seconds.

    connect: one connection attempt. control: our own probes, metadata, index, unload. load: our own loads.
    read: a relayed call that only reads. call: a relayed inference or load, or an inference of ours.
    keepalive: silence on a gRPC connection with calls in flight before a ping asks whether the engine is there;
    keepalive_timeout: how long the pong may take.
    """

    connect_s: float = 2.0
    control_s: float = 5.0
    load_s: float = 600.0
    read_s: float = 30.0
    call_s: float = 600.0
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 5.0


class RetryBudget:
    """A bucket of second sendings, filled by first ones: when every call fails, the engine sees a tenth more.

    One for an engine, all its replicas and both protocols. now: monotonic seconds.

    share: second sendings for each call sent. floor_per_s: allowed besides, so that a quiet gateway may, too.
    burst: what is saved up at most, and there at the start: one connection that ends under many calls.
    """

    def __init__(self, *, share: float = 0.1, floor_per_s: float = 1.0, burst: float = 32.0) -> None:
        self._share, self._floor_per_s, self._burst = share, floor_per_s, burst
        self._saved = burst
        self._filled_at: float | None = None
        self._counted = 0
        self.calls = 0  # first attempts; the sender increments this
        self.taken = 0
        self.refused = 0

    def take(self, now: float) -> bool:
        """Whether one more call may be sent again; it is taken for sent."""
        self._fill(now)
        if self._saved < 1.0:
            self.refused += 1
            return False
        self._saved -= 1.0
        self.taken += 1
        return True

    def take_elsewhere(self, now: float) -> bool:
        """The same for a call that goes to another replica, whose client counts it as if it were a first one."""
        is_taken = self.take(now)
        self.calls -= is_taken
        return is_taken

    def _fill(self, now: float) -> None:
        if self._filled_at is not None:
            self._saved += (now - self._filled_at) * self._floor_per_s
        self._saved = min(self._saved + (self.calls - self._counted) * self._share, self._burst)
        self._filled_at, self._counted = now, self.calls

    def __repr__(self) -> str:
        return f"<RetryBudget {self._saved:.1f} saved, {self.taken} taken, {self.refused} refused>"


GRPC_PREFIX = "triton-grpc-protocol-"  # what Triton's --grpc-restricted-protocol puts before the name
_MAX_BYTES = 16_384
_LINE = re.compile(r"(?P<name>[A-Za-z0-9_.-]+):[ \t]*(?P<value>[!-~]([ -~]*[!-~])?)")


class HeaderFileError(Exception):
    """The file cannot be read, or contains no headers. The text names the file, never a value."""


class EngineHeaders:
    """Headers for calls to the engine: over HTTP by their names; over gRPC also with Triton's prefix.

    They replace what a client sent under the same names. The repr shows no values.
    """

    def __init__(self, headers: tuple[tuple[str, str], ...] = ()) -> None:
        named = {name.lower(): value for name, value in headers}
        self._http = tuple((name.encode(), value.encode()) for name, value in named.items())
        self._grpc = tuple((prefix + name, value) for name, value in named.items() for prefix in ("", GRPC_PREFIX))
        self._names = frozenset(name for name, _ in self._grpc)

    @property
    def names_and_values(self) -> tuple[tuple[str, str], ...]:
        """Every header by its own name and with Triton's prefix, names in lower case."""
        return self._grpc

    def over_http(self, call: HttpCall) -> HttpCall:
        """The call as it is sent to the engine."""
        if not self._http:
            return call
        others = tuple(pair for pair in call.headers if pair[0].lower().decode("latin-1") not in self._names)
        return replace(call, headers=(*others, *self._http))

    def over_grpc(self, metadata: GrpcMetadata) -> GrpcMetadata:
        """The metadata as it is sent to the engine."""
        if not self._grpc:
            return metadata
        return (*(pair for pair in metadata if pair[0] not in self._names), *self._grpc)

    def __repr__(self) -> str:
        return f"EngineHeaders({', '.join(name.decode() for name, _ in self._http)})"


def read_header_file(path: Path) -> tuple[tuple[str, str], ...]:
    """The headers in a file, one `NAME: VALUE` per line; empty lines and lines that begin with # are skipped.

    Raises HeaderFileError.
    """
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
