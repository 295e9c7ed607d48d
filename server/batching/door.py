"""Who is refused on arrival, since recent batches gave up everybody who came with as little time. Sans-IO.

A batch gives up those whose deadline would keep it small. Under a steady overload it gives up the same ones each time:
those who come while the engine has far to go. They are told at once, without having waited for it.
"""

from collections import deque

BATCHES = 8  # in a row that gave up somebody are an overload
MARGIN = 0.8  # of the least time that one of them took: refused with less


class Door:
    """least_s: time from the next batch's begin to the deadline that is needed to be taken; 0 without an overload."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=BATCHES)
        self.least_s = 0.0
        self.priority = 0  # whoever is served before this one is always taken

    def formed(self, least_s: float, priority: int | None) -> None:
        """A batch was formed. least_s: of its members; priority: the first one that it gave up, None for nobody."""
        if priority is None:
            self._seen.clear()
            self.least_s = 0.0
            return
        self._seen.append((least_s, priority))
        if len(self._seen) == BATCHES:
            self.least_s = min(least_s for least_s, _ in self._seen) * MARGIN
            self.priority = max(priority for _, priority in self._seen)
