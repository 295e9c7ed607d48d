"""How many rows a batch may have while it is not known what they take, or what fits the engine's memory. Sans-IO."""

DECREASE = 0.9


class SizeLimit:
    """Additive increase, multiplicative decrease: doubles at first, falls where a call took too long for its SLO.

    An engine out of memory halves it, and from there it grows back by one row for each full batch.
    """

    def __init__(self, max_rows: int) -> None:
        self.by_memory = max_rows
        self._max_rows = max_rows
        self._by_time = 1
        self._is_doubling = True

    @property
    def rows(self) -> int:
        """At most so many in a batch with a deadline while there is no fit; by_memory: in any batch."""
        return min(self._by_time, self.by_memory)

    def answered(self, rows: int, seconds: float, budget_s: float | None) -> None:
        """A call of so many rows took so long; budget_s: what it may take."""
        if rows >= self.by_memory:
            self.by_memory = min(rows + 1, self._max_rows)
        if budget_s is not None and seconds > budget_s:
            self._is_doubling = False
            self._by_time = max(int(min(rows, self._by_time) * DECREASE), 1)
        elif rows >= self._by_time:
            self._by_time = min(rows * 2 if self._is_doubling else rows + 1, self._max_rows)

    def out_of_memory(self, rows: int) -> None:
        """A call of so many rows did not fit."""
        self.by_memory = max(min(rows, self.by_memory) // 2, 1)
