"""What it takes until callers have the answers of a call that the engine is through with, learned as it goes. Sans-IO.

A deadline is promised to the caller, and the answers of a batch are split, encoded and written one after the other.
"""

from collections import deque
from itertools import accumulate

BATCHES = 16  # that the usual time is taken from
FEWEST = 4  # before that nothing is known


class Deliveries:
    """The last batches. A strange one moves nothing.

    By rows, since a batch of one says little: what else the gateway does meanwhile is in its time, too.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=BATCHES)

    def learn(self, rows: int, seconds: float) -> None:
        """So long after the engine's answer all of so many rows were told."""
        self._seen.append((seconds / rows, rows))

    @property
    def row_s(self) -> float:
        """What each row of a batch adds, as most rows went; 0 before a few batches."""
        if len(self._seen) < FEWEST:
            return 0.0
        ordered = sorted(self._seen)
        half = sum([rows for _, rows in ordered]) / 2
        until = accumulate([rows for _, rows in ordered])
        return next(row_s for (row_s, _), rows in zip(ordered, until, strict=True) if rows >= half)
