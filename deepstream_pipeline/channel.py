"""The bounded queue between two threads: what it holds, what it lost, and who waits for whom."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from deepstream_pipeline.types import DropPolicy

T = TypeVar("T")
MOST_KEPT = 4096  # items that may not be lost, of a taker that does not come


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """depth: items inside; size_bytes: of them. dropped: lost so far, since it was full or closed."""

    depth: int
    dropped: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Held(Generic[T]):
    item: T
    size_bytes: int
    is_kept: bool


class Channel(Generic[T]):
    """First in, first out. Any threads may put and take.

    capacity: items at most. policy: what `put` does when it is full: block waits until there is room or the channel is
    closed. patience_s: who takes has to come again within it; else block waits no longer, and loses the oldest.
    capacity_bytes: at most, by size_of; a single item may have more.
    """

    def __init__(
        self,
        capacity: int,
        policy: DropPolicy,
        *,
        patience_s: float = math.inf,
        size_of: Callable[[T], int] = lambda _: 0,
        capacity_bytes: int = 1,
    ) -> None:
        self._items: deque[_Held[T]] = deque()
        self._capacity = max(capacity, 1)
        self._capacity_bytes = capacity_bytes
        self._size_of = size_of
        self._policy = policy
        self._patience_s = patience_s
        self._dropped = self._kept = self._size_bytes = 0
        self._is_closed = False
        self._taker_came_at = time.monotonic()
        self._changed = threading.Condition()

    def put(self, item: T, policy: DropPolicy | None = None, *, is_kept: bool = False) -> bool:
        """Whether the item was taken. With drop-oldest it always is, while the channel is open.

        policy: for this item, in place of the channel's own. is_kept: it is small and may not be lost: it comes in
        without waiting, beyond the capacity, and loses its place to no other (MOST_KEPT of such items at most).
        """
        policy = policy or self._policy
        held = _Held(item, self._size_of(item), is_kept)
        with self._changed:
            if policy is DropPolicy.BLOCK and not is_kept:
                self._await_room(held)
            if self._is_closed or not self._has_place(held, policy):
                self._dropped += 1
                return False
            while not is_kept and self._is_full(held):
                self._drop_oldest()
            self._items.append(held)
            self._count(held, 1)
            self._changed.notify_all()
            return True

    def take(self, timeout_s: float) -> T | None:
        """The oldest item; None where none came in time, or the channel is closed and empty."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._taker_came_at = time.monotonic()
            while not self._items:
                left = until - time.monotonic()
                if self._is_closed or left <= 0:
                    return None
                self._changed.wait(left)
            self._taker_came_at = time.monotonic()
            held = self._items.popleft()
            self._count(held, -1)
            self._changed.notify_all()
            return held.item

    def close(self, *, is_hurried: bool = False) -> None:
        """Nothing more is taken in; what is inside can still be taken out, unless it is hurried."""
        with self._changed:
            self._is_closed = True
            if is_hurried:
                self._dropped += len(self._items)
                self._items.clear()
                self._kept = self._size_bytes = 0
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Closed and empty."""
        with self._changed:
            return self._is_closed and not self._items

    def statistics(self) -> ChannelStatistics:
        """As it is now."""
        with self._changed:
            return ChannelStatistics(len(self._items), self._dropped, self._size_bytes)

    # with the lock

    def _await_room(self, held: _Held[T]) -> None:
        while self._is_full(held) and not self._is_closed:
            left = self._taker_came_at + self._patience_s - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left if math.isfinite(left) else None)

    def _has_place(self, held: _Held[T], policy: DropPolicy) -> bool:
        if held.is_kept:
            return self._kept < MOST_KEPT
        return policy is not DropPolicy.DROP_NEWEST or not self._is_full(held)

    def _is_full(self, held: _Held[T]) -> bool:
        """Whether others, that may be lost, leave it no room."""
        count = len(self._items) - self._kept
        is_heavy = bool(held.size_bytes) and self._size_bytes + held.size_bytes > self._capacity_bytes
        return bool(count) and (count >= self._capacity or is_heavy)

    def _drop_oldest(self) -> None:
        index = next(number for number, held in enumerate(self._items) if not held.is_kept)
        self._count(self._items[index], -1)
        del self._items[index]
        self._dropped += 1

    def _count(self, held: _Held[T], sign: int) -> None:
        self._kept += sign * held.is_kept
        self._size_bytes += sign * held.size_bytes
