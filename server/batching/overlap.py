"""How long before the engine is free the next batch is sent, so that the engine never waits for it. Sans-IO.

A call that is sent to an idle engine takes the way there and back as well; one that waits at the engine's door does
not. What the second kind saves is what a batch is sent earlier than the engine is due, and no earlier: until then it
grows. Every sixteenth batch is sent when the engine is free, so that whole calls are seen; every sixteenth, half-way
between, is sent a little too early, so that more is noticed where more can be saved.
"""

from enum import Enum, auto

PERIOD = 16
MARGIN = 1.25  # sent so many times the overhead before the engine is due
TOO_EARLY = 2.0
TOO_EARLY_SHARE = 0.05  # of a call of no rows
WEIGHT = 0.3
LEAST_SHARE = 0.02  # of a call of no rows; less is noise, and batches had better grow


class _Turn(Enum):
    WHOLE = auto()
    EARLY = auto()
    USUAL = auto()


class Overlap:
    """overhead_s: what a call to an idle engine takes beyond the engine's own work, as far as it is known."""

    def __init__(self) -> None:
        self._seen_s = 0.0
        self.overhead_s = 0.0

    def lead_s(self, call_s: float, number: int) -> float:
        """How early the batch of that number is sent; call_s: what a call of no rows takes."""
        turn = _turn(number)
        if turn is _Turn.WHOLE:
            return 0.0
        if turn is _Turn.EARLY:
            return self.overhead_s * TOO_EARLY + call_s * TOO_EARLY_SHARE
        return self.overhead_s * MARGIN if self.overhead_s > call_s * LEAST_SHARE else 0.0

    def whole_s(self, took_s: float, lead_s: float) -> float:
        """What a call would have taken by itself that was sent lead_s early and took so long from then on."""
        return took_s + min(self.overhead_s, lead_s)

    def learn(self, expected_s: float, took_s: float, lead_s: float) -> None:
        """A call that was sent lead_s early took so long from when the engine was free; by itself expected_s."""
        if lead_s < self.overhead_s or lead_s <= 0.0:
            return
        saved_s = min(max(expected_s - took_s, -lead_s), lead_s)
        self._seen_s += (saved_s - self._seen_s) * WEIGHT
        self.overhead_s = max(self._seen_s, 0.0)


def _turn(number: int) -> _Turn:
    turn = number % PERIOD
    if turn == 0:
        return _Turn.WHOLE
    return _Turn.EARLY if turn == PERIOD // 2 else _Turn.USUAL
