"""How many streams are tried next, and whether a number was held. Pure arithmetic."""

from dataclasses import dataclass

MOST_DROPPED = 0.01  # of the decoded frames
LEAST_PLAYED = 0.97  # of the time that passed: a camera that is read too slowly falls behind


@dataclass(frozen=True, slots=True)
class Trial:
    """A number of streams for some seconds. p99_ms: of results, decoding to sinks; NaN where there were none.

    dropped_share: of the decoded frames. played_share: how far the slowest stream came, by the seconds that passed.
    trouble: a stream that does not run, in words.
    """

    streams: int
    p99_ms: float
    dropped_share: float
    played_share: float
    rate: float
    trouble: str = ""

    def complaint(self, slo_p99_ms: float) -> str:
        """Why the number was not held; empty where it was."""
        if self.trouble:
            return self.trouble
        if not self.p99_ms <= slo_p99_ms:  # NaN is no latency
            return f"p99 {self.p99_ms:.0f} ms"
        if self.dropped_share > MOST_DROPPED:
            return f"{self.dropped_share:.1%} of the frames dropped"
        if self.played_share < LEAST_PLAYED:
            return f"the slowest stream played {self.played_share:.0%} of the time"
        return ""


class StreamSearch:
    """Doubles until a number is not held, then halves what lies between."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        self._broken = most + 1

    def next_count(self) -> int | None:
        """What to try; None where `held` is known."""
        if self._broken - self.held <= 1:
            return None
        if self._broken > self._most and not self.held:
            return 1
        if self._broken > self._most:
            return min(2 * self.held, self._most)
        return (self.held + self._broken) // 2

    def record(self, count: int, *, is_held: bool) -> None:
        """What came of a trial."""
        if is_held:
            self.held = max(self.held, count)
        else:
            self._broken = min(self._broken, count)
