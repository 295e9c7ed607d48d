"""How long a source waits before it is opened again, and how many may be opened at one moment."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Twice as long after each failure in a row, from first_s to cap_s. chance: the part of it that jitter decides."""

    first_s: float = 1.0
    cap_s: float = 30.0
    chance: float = 0.5

    def delay_s(self, failures: int, jitter: float) -> float:
        """After so many failures in a row, at least one. jitter: in [0, 1)."""
        longest = min(self.cap_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return longest * (1.0 - self.chance + self.chance * jitter)


class OpeningGate(Generic[Key]):
    """Lets so many sources be opened at one moment: a process that starts, and looks what its stream is, wants a core.

    It is left when the source is open or its process is over, and after hold_s at the latest: who still waits for a
    camera by then burns nothing, and does not keep others from theirs.
    """

    def __init__(self, places: int, hold_s: float = 3.0) -> None:
        self._places = places
        self._hold_s = hold_s
        self._inside: dict[Key, float] = {}
        self._queue: deque[Key] = deque()
        self._queued: set[Key] = set()

    def ask(self, key: Key) -> None:
        """Stand in the queue; who stands there already keeps the place."""
        if key not in self._queued:
            self._queued.add(key)
            self._queue.append(key)

    def is_asking(self, key: Key) -> bool:
        return key in self._queued

    def next(self, now: float) -> Key | None:
        """Who may ask no longer and begin, if it still wants to: it is inside once `enter` is called."""
        self._inside = {key: until for key, until in self._inside.items() if until > now}
        if not self._queue or len(self._inside) >= self._places:
            return None
        key = self._queue.popleft()
        self._queued.discard(key)
        return key

    def enter(self, key: Key, now: float) -> None:
        self._inside[key] = now + self._hold_s

    def leave(self, key: Key) -> None:
        self._inside.pop(key, None)

    def next_wakeup(self) -> float | None:
        """When `next` can say something else, if nobody leaves before."""
        if not self._queue or not self._inside:
            return None
        return min(self._inside.values())
