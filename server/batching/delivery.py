"""What it takes until callers have the answers of a call that the engine is through with, learned as it goes. Sans-IO.

A deadline is promised to the caller, and the answers of a batch are split, encoded and written one after the other.
"""

from collections import deque

BATCHES = 16  # that the usual time is taken from
FEWEST = 4  # before that nothing is known


class Deliveries:
    """row_s: what each row of a batch adds, as most of the rows of the last batches went. A strange one moves nothing.

    By rows, since a batch of one says little: what else the gateway does meanwhile is in its time, too.
    """

    def __init__(self) -> None:
        self.row_s = 0.0
        self._seen: deque[tuple[float, int]] = deque(maxlen=BATCHES)

    def learn(self, rows: int, seconds: float) -> None:
        """So long after the engine's answer all of so many rows were told."""
        self._seen.append((seconds / rows, rows))
        if len(self._seen) < FEWEST:
            return
        left = sum([seen_rows for _, seen_rows in self._seen]) / 2
        for row_s, seen_rows in sorted(self._seen):
            self.row_s = row_s
            left -= seen_rows
            if left <= 0:
                return
