"""Who is refused on arrival, since recent batches gave up everybody who came with as little time. Sans-IO.

A batch gives up those whose deadline would keep it small. Under a steady overload it gives up the same ones each time:
those who come while the engine has far to go. They are told at once, without having waited for it. Whom the door keeps
away no batch has to give up: where it kept somebody away, a batch that gives up nobody opens it a little only.
"""

from collections import deque

BATCHES = 8  # in a row that gave up somebody are an overload
MARGIN = 0.95  # of the least time that one of them took: refused with less
OPENING = 0.9  # of what was needed so far


class Door:
    """least_s: time from the next batch's begin to the deadline that is needed to be taken; 0 without an overload."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=BATCHES)
        self._kept_away = 0
        self.least_s = 0.0
        self.priority = 0  # whoever is served before this one is always taken

    def kept_away(self) -> None:
        """Somebody was refused who had less time than least_s, and for nothing else."""
        self._kept_away += 1

    def formed(self, least_s: float, priority: int | None) -> None:
        """A batch was formed. least_s: of its members; priority: the first one that it gave up, None for nobody."""
        kept_away, self._kept_away = self._kept_away, 0
        if priority is None:
            self._open(kept_away)
            return
        self._seen.append((least_s, priority))
        if len(self._seen) == BATCHES:
            self.least_s = min(least_s for least_s, _ in self._seen) * MARGIN
            self.priority = max(priority for _, priority in self._seen)

    def _open(self, kept_away: int) -> None:
        if kept_away:
            self.least_s *= OPENING
        else:
            self._seen.clear()
            self.least_s = 0.0
