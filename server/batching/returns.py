"""How soon those who were answered come again, and how long a batch waits for them. Sans-IO.

Callers that ask one thing after another fall into two groups, which the engine serves in turn, in small batches. To
wait for the group that was just answered joins them for good, and costs less than the call that it saves as long as
they come back quickly: half of what a call of no rows takes is the most that is waited. Independent callers never come
that quickly, since a batch holds about as many as come in the time of a call.
"""

MOST = 0.95  # of the rows that were answered are back: all that will be waited for
WEIGHT = 0.2  # of one batch in the usual time
MARGIN = 1.25  # times the usual time are waited
AT_MOST = 0.5  # of a call of no rows


class Returns:
    """Watches one batch after the other from its end on."""

    def __init__(self) -> None:
        self._usual_s = float("inf")
        self._from = 0.0
        self._rows = 0
        self._came = 0
        self._wanted = 0.0

    def answered(self, rows: int, now: float) -> None:
        """A batch of so many rows came back: its callers may ask again."""
        if self._came < self._wanted:
            self._learn((now - self._from) * 2)
        self._rows, self._wanted, self._came, self._from = rows, rows * MOST, 0, now

    def came(self, rows: int, now: float) -> None:
        """So many rows were asked for."""
        if self._came < self._wanted:
            self._came += rows
            if self._came >= self._wanted:
                self._learn(now - self._from)

    def are_quick(self, call_s: float) -> bool:
        """Whether waiting for them costs less than it saves; call_s: what a call of no rows takes."""
        return self._usual_s * MARGIN <= call_s * AT_MOST

    def until(self, waiting: int, *, max_rows: int) -> float:
        """When those that were answered last should be back; at once where most are, or not all have room."""
        if self._came >= self._wanted or waiting + self._rows - self._came > max_rows:
            return 0.0
        return self._from + self._usual_s * MARGIN

    def _learn(self, seconds: float) -> None:
        if self._usual_s == float("inf"):
            self._usual_s = seconds
        self._usual_s += (seconds - self._usual_s) * WEIGHT
