"""Options of the REST port: limits of requests and connections, and when a slow one is closed (sans-IO)."""

from dataclasses import dataclass, field
from enum import Enum

from penstock.gateway.rest.home_page import HomePage
from penstock.port_policy import PortLimits


@dataclass(frozen=True, slots=True)
class RestOptions:
    """max_body_bytes: of a body as sent, and decompressed. body_timeout_s: from the head to the body's last byte.

    max_model_bytes: of a model's file, which may take body_timeout_s and its size over min_upload_bytes_per_s.
    """

    max_body_bytes: int = 64 << 20
    body_timeout_s: float = 30.0
    max_json_depth: int = 64
    max_parts: int = 100
    max_model_bytes: int = 1 << 30
    min_upload_bytes_per_s: int = 256 << 10
    home_page: HomePage = field(default_factory=HomePage)


@dataclass(frozen=True, slots=True)
class ConnectionLimits(PortLimits):
    """Limits of a connection, in addition to the number of connections.

    max_head_bytes: of a request line and its headers. head_timeout_s: from a head's first byte to its last.
    idle_timeout_s: without a request. max_pipelined: requests waiting behind the one that runs.
    write_timeout_s, min_write_bytes_per_s: a client with an unread answer must take that many bytes a second, on
    average over that time; one that takes less is cut.
    """

    max_head_bytes: int = 64 << 10
    max_headers: int = 1024
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    max_pipelined: int = 64
    write_timeout_s: float = 30.0
    min_write_bytes_per_s: int = 4 << 10


LINGER_S = 1.0


class ConnectionPhase(Enum):
    """idle: no request has begun. head: one is arriving. busy: a request runs. refused: the last response is sent."""

    IDLE = "idle"
    HEAD = "head"
    BUSY = "busy"
    REFUSED = "refused"


class TimeoutAction(Enum):
    """The action for a connection."""

    KEEP = "keep"
    CLOSE = "close"
    HEAD_TOO_SLOW = "head too slow"
    ABORT = "abort"


_ACTION_AT_TIMEOUT = {
    ConnectionPhase.IDLE: TimeoutAction.CLOSE,
    ConnectionPhase.HEAD: TimeoutAction.HEAD_TOO_SLOW,
    ConnectionPhase.REFUSED: TimeoutAction.ABORT,
}


class ConnectionTimeouts:
    """Timeouts of one connection. Times are monotonic seconds."""

    __slots__ = ("_acknowledged_bytes", "_limits", "_phase", "_since", "_turn", "_unread_since")

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._phase = ConnectionPhase.BUSY
        self._turn = -1
        self._since = 0.0
        self._unread_since: float | None = None
        self._acknowledged_bytes = 0

    def look(self, now: float, phase: ConnectionPhase, *, turn: int) -> TimeoutAction:
        """turn: the number of requests begun, which tells one head from the next."""
        if phase is not self._phase or turn != self._turn:
            self._phase, self._turn, self._since = phase, turn, now
        if phase is ConnectionPhase.BUSY or now - self._since < self._limit_s(phase):
            return TimeoutAction.KEEP
        return _ACTION_AT_TIMEOUT[phase]

    def look_at_reader(self, now: float, acknowledged_bytes: int | None) -> TimeoutAction:
        """acknowledged_bytes: of all answers, those that the client has taken; None while none is unread."""
        if acknowledged_bytes is None:
            self._unread_since = None
            return TimeoutAction.KEEP
        if self._unread_since is None:
            self._unread_since, self._acknowledged_bytes = now, acknowledged_bytes
        elapsed_s = now - self._unread_since
        if elapsed_s < self._limits.write_timeout_s:
            return TimeoutAction.KEEP
        if acknowledged_bytes - self._acknowledged_bytes < elapsed_s * self._limits.min_write_bytes_per_s:
            return TimeoutAction.ABORT
        self._unread_since, self._acknowledged_bytes = now, acknowledged_bytes
        return TimeoutAction.KEEP

    def _limit_s(self, phase: ConnectionPhase) -> float:
        if phase is ConnectionPhase.HEAD:
            return self._limits.head_timeout_s
        return self._limits.idle_timeout_s if phase is ConnectionPhase.IDLE else LINGER_S
