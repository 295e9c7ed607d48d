"""When a peer that is silent over calls in flight is asked whether it is there, and when it is given up. Sans-IO."""

from enum import Enum

MAX_PINGS = 2


class Due(Enum):
    """What a look at the connection calls for."""

    NOTHING = "nothing"
    PING = "ask whether the peer is there"
    GIVE_UP = "take the peer for gone"


class Keepalive:
    """After silence_s without a word a ping is due, and after timeout_s more without one the peer is gone.

    Two pings at most until something was sent again: a gRPC server with default settings takes more for an attack.
    Seconds, `now` of one monotonic clock.
    """

    def __init__(self, silence_s: float, timeout_s: float) -> None:
        self.interval_s = min(silence_s, timeout_s) / 2
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._heard_at = 0.0
        self._asked_at: float | None = None
        self._pings = 0

    def heard(self, now: float) -> None:
        """The peer said something, whatever it was."""
        self._heard_at = now
        self._asked_at = None

    def sent(self, now: float, *, is_first: bool) -> None:
        """A call begins. is_first: none was in flight before it, so the silence until now does not count."""
        self._pings = 0
        if is_first:
            self._heard_at = now
            self._asked_at = None

    def due(self, now: float) -> Due:
        """What to do now, while calls are in flight."""
        if self._asked_at is not None:
            return Due.GIVE_UP if now - self._asked_at >= self._timeout_s else Due.NOTHING
        if now - self._heard_at < self._silence_s or self._pings >= MAX_PINGS:
            return Due.NOTHING
        self._asked_at = now
        self._pings += 1
        return Due.PING
