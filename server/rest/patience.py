"""How long a connection is borne with. Sans-IO: what is seen at intervals comes in, a verdict goes out.

Nothing is stamped while requests are served: a phase begins when it is first seen, so verdicts come up to one interval
late, and a request costs no clock.
"""

from enum import Enum

from server.rest.limits import ConnectionLimits

LINGER_S = 1.0


class Phase(Enum):
    """idle: no request has begun. head: one is on its way. busy: one runs. refused: the last answer is given."""

    IDLE = "idle"
    HEAD = "head"
    BUSY = "busy"
    REFUSED = "refused"


class Verdict(Enum):
    """What shall become of the connection."""

    KEEP = "keep"
    CLOSE = "close"
    HEAD_TOO_SLOW = "head too slow"
    ABORT = "abort"


_AT_THE_END = {Phase.IDLE: Verdict.CLOSE, Phase.HEAD: Verdict.HEAD_TOO_SLOW, Phase.REFUSED: Verdict.ABORT}


class ConnectionPatience:
    """One connection's. Times are monotonic seconds."""

    __slots__ = ("_acknowledged_bytes", "_limits", "_phase", "_since", "_turn", "_unread_since")

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._phase = Phase.BUSY
        self._turn = -1
        self._since = 0.0
        self._unread_since: float | None = None
        self._acknowledged_bytes = 0

    def look(self, now: float, phase: Phase, *, turn: int) -> Verdict:
        """turn: the number of requests begun, which tells one head from the next."""
        if phase is not self._phase or turn != self._turn:
            self._phase, self._turn, self._since = phase, turn, now
        if phase is Phase.BUSY or now - self._since < self._limit_s(phase):
            return Verdict.KEEP
        return _AT_THE_END[phase]

    def look_at_reader(self, now: float, acknowledged_bytes: int | None) -> Verdict:
        """acknowledged_bytes: of all answers, those that the client has taken; None while none is unread."""
        if acknowledged_bytes is None:
            self._unread_since = None
            return Verdict.KEEP
        if self._unread_since is None:
            self._unread_since, self._acknowledged_bytes = now, acknowledged_bytes
        elapsed_s = now - self._unread_since
        if elapsed_s < self._limits.write_timeout_s:
            return Verdict.KEEP
        if acknowledged_bytes - self._acknowledged_bytes < elapsed_s * self._limits.min_write_bytes_per_s:
            return Verdict.ABORT
        self._unread_since, self._acknowledged_bytes = now, acknowledged_bytes
        return Verdict.KEEP

    def _limit_s(self, phase: Phase) -> float:
        if phase is Phase.HEAD:
            return self._limits.head_timeout_s
        return self._limits.idle_timeout_s if phase is Phase.IDLE else LINGER_S
