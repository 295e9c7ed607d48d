"""Waiting times between attempts, and how often a failure is logged. No I/O and no clock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubles after each consecutive failure, from first_s to cap_s. chance: the share that jitter decides."""

    first_s: float = 1.0
    cap_s: float = 30.0
    chance: float = 0.5

    def delay_s(self, failures: int, jitter: float) -> float:
        """The pause after this number of consecutive failures, at least one. jitter: in [0, 1)."""
        longest = min(self.cap_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return longest * (1.0 - self.chance + self.chance * jitter)


class Outage:
    """State of retries after a failure. is_open: whether the last attempt failed. lost: losses in total. Times are
    monotonic seconds."""

    def __init__(self, backoff: Backoff) -> None:
        self.lost = 0
        self.is_open = False
        self._backoff = backoff
        self._failures = 0
        self._again_at = 0.0
        self._lost_before = 0

    def may_try(self, now: float) -> bool:
        """Whether an attempt is due."""
        return not self.is_open or now >= self._again_at

    def failed(self, now: float, *, jitter: float = 1.0) -> bool:
        """Notes a failed attempt. Returns whether the one before succeeded."""
        is_news, self.is_open = not self.is_open, True
        if is_news:
            self._lost_before, self._failures = self.lost, 0
        self._failures += 1
        self._again_at = now + self._backoff.delay_s(self._failures, jitter)
        return is_news

    def worked(self) -> int | None:
        """Notes a successful attempt. Returns the losses since the first failure, None if there was none."""
        if not self.is_open:
            return None
        self.is_open = False
        return self.lost - self._lost_before
