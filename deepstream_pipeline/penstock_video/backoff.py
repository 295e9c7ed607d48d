"""Waiting times between attempts, and how often a failure is logged. No I/O and no clock."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


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


class OpeningGate(Generic[Key]):
    """Limits how many sources are opened at the same time: starting and probing needs a core. A source leaves when it
    is open or its process ended, and after hold_s, since waiting for a camera needs no CPU."""

    def __init__(self, places: int, hold_s: float = 3.0) -> None:
        self._places = places
        self._hold_s = hold_s
        self._inside: dict[Key, float] = {}
        self._queue: deque[Key] = deque()
        self._queued: set[Key] = set()

    def ask(self, key: Key) -> None:
        """Joins the queue; a source that waits already keeps its position."""
        if key not in self._queued:
            self._queued.add(key)
            self._queue.append(key)

    def is_asking(self, key: Key) -> bool:
        return key in self._queued

    def next(self, now: float) -> Key | None:
        """The next source that may start; it counts once `enter` is called."""
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
        """When `next` can change its answer, if no source leaves before."""
        if not self._queue or not self._inside:
            return None
        return min(self._inside.values())


class Outage:
    """State of retries after a failure. `lost` counts losses in total; times are monotonic seconds."""

    def __init__(self, backoff: Backoff) -> None:
        self.lost = 0
        self._backoff = backoff
        self._failures = 0
        self._again_at: float | None = None
        self._lost_before = 0

    @property
    def is_open(self) -> bool:
        """Whether the last attempt failed."""
        return self._again_at is not None

    def may_try(self, now: float) -> bool:
        """Whether an attempt is due."""
        return self._again_at is None or now >= self._again_at

    def failed(self, now: float, *, jitter: float = 1.0) -> bool:
        """Notes a failed attempt. Returns whether the one before succeeded."""
        is_news = self._again_at is None
        if is_news:
            self._lost_before, self._failures = self.lost, 0
        self._failures += 1
        self._again_at = now + self._backoff.delay_s(self._failures, jitter)
        return is_news

    def worked(self) -> int | None:
        """Notes a successful attempt. Returns the losses since the first failure, None if there was none."""
        if self._again_at is None:
            return None
        self._again_at = None
        return self.lost - self._lost_before
