"""The bounded queue between two threads: what it holds, what it lost, and who waits for whom."""

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from deepstream_pipeline.types import DropPolicy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """depth: items inside. dropped: lost so far, since it was full or closed."""

    depth: int
    dropped: int


class Channel(Generic[T]):
    """First in, first out. Any threads may put and take.

    capacity: items at most. policy: what `put` does when it is full: block waits until there is room or the channel is
    closed.
    """

    def __init__(self, capacity: int, policy: DropPolicy) -> None:
        self._items: deque[T] = deque()
        self._capacity = max(capacity, 1)
        self._policy = policy
        self._dropped = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, item: T, policy: DropPolicy | None = None) -> bool:
        """Whether the item was taken. With drop-oldest it always is, while the channel is open.

        policy: for this item, in place of the channel's own.
        """
        policy = policy or self._policy
        with self._changed:
            while policy is DropPolicy.BLOCK and len(self._items) >= self._capacity and not self._is_closed:
                self._changed.wait()
            if self._is_closed or (policy is DropPolicy.DROP_NEWEST and len(self._items) >= self._capacity):
                self._dropped += 1
                return False
            if len(self._items) >= self._capacity:
                self._items.popleft()
                self._dropped += 1
            self._items.append(item)
            self._changed.notify_all()
            return True

    def take(self, timeout_s: float) -> T | None:
        """The oldest item; None where none came in time, or the channel is closed and empty."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while not self._items:
                left = until - time.monotonic()
                if self._is_closed or left <= 0:
                    return None
                self._changed.wait(left)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self, *, is_hurried: bool = False) -> None:
        """Nothing more is taken in; what is inside can still be taken out, unless it is hurried."""
        with self._changed:
            self._is_closed = True
            if is_hurried:
                self._dropped += len(self._items)
                self._items.clear()
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Closed and empty."""
        with self._changed:
            return self._is_closed and not self._items

    def statistics(self) -> ChannelStatistics:
        """As it is now."""
        with self._changed:
            return ChannelStatistics(len(self._items), self._dropped)
