"""How many calls may be sent to the engine a second time. Sans-IO."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """share: second sendings for each call sent. floor_per_s: allowed besides, so that a quiet gateway may, too.

    burst: what is saved up at most, and there at the start: one connection that ends under many calls.
    """

    share: float = 0.1
    floor_per_s: float = 1.0
    burst: float = 32.0


class RetryBudget:
    """A bucket of second sendings, filled by first ones: when every call fails, the engine sees a tenth more.

    One for an engine, all its replicas and both protocols. now: monotonic seconds.
    """

    def __init__(self, limits: RetryLimits | None = None) -> None:
        self._limits = limits or RetryLimits()
        self._saved = self._limits.burst
        self._filled_at: float | None = None
        self._counted = 0
        self.calls = 0  # sent for the first time: whoever sends one counts it here, which is all that it costs
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
        limits = self._limits
        if self._filled_at is not None:
            self._saved += (now - self._filled_at) * limits.floor_per_s
        self._saved += (self.calls - self._counted) * limits.share
        self._saved = min(self._saved, limits.burst)
        self._filled_at, self._counted = now, self.calls

    def __repr__(self) -> str:
        return f"<RetryBudget {self._saved:.1f} saved, {self.taken} taken, {self.refused} refused>"
