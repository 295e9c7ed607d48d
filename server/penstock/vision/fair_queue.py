"""Decisions of the decode pool, without I/O: a queue that is fair between clients, and a quarantine of images."""

import hashlib
import math
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")

SLOW_S = 1.0  # a picture that took longer limits its client
LIMITED_S = 60.0  # duration of that limit; also how long clients count as concurrent
MAX_CLIENTS = 4096  # clients remembered; the least recently seen one is removed first


class FairQueue(Generic[T]):
    """Waiting items by client. The client whose last turn is longest ago is next. At most `workers` items run.

    While there are several clients, one that is new or had a slow picture lately may use all workers but one.
    """

    def __init__(self, workers: int) -> None:
        self._reserved_from = max(workers - 1, 1)
        self._waiting: dict[str, deque[T]] = {}
        # By client that waits or runs: its last turn, or the turn at its arrival; and whether it had a turn.
        self._ranks: dict[str, tuple[int, bool]] = {}
        self._turns = 0
        self._running: Counter[str] = Counter()
        self._limited_until: OrderedDict[str, float] = OrderedDict()
        self._count = 0
        self._latest: str | None = None
        self._shared_until = -math.inf

    def __len__(self) -> int:
        return self._count

    def add(self, client: str, item: T, now: float) -> None:
        """Appends an item to the client's queue."""
        if client != self._latest:
            self._shared_until = -math.inf if self._latest is None else now + LIMITED_S
            self._latest = client
        self._waiting.setdefault(client, deque()).append(item)
        self._ranks.setdefault(client, (self._turns, False))
        self._count += 1

    def remove(self, client: str, item: T) -> None:
        """Removes a waiting item; no effect if it was taken."""
        line = self._waiting.get(client)
        if line is None or item not in line:
            return
        line.remove(item)
        self._count -= 1
        self._tidy(client)

    def take(self, now: float) -> tuple[str, T] | None:
        """The next client and item, which runs until ended(). None if no item waits or may run."""
        clients = [client for client in self._waiting if self._may_run(client, now)]
        if not clients:
            return None
        client = min(clients, key=self._ranks.__getitem__)
        item = self._waiting[client].popleft()
        self._turns += 1
        self._ranks[client] = self._turns, True
        self._count -= 1
        self._running[client] += 1
        self._tidy(client)
        return client, item

    def ended(self, client: str, now: float, took_s: float | None) -> None:
        """Marks one of the client's items as ended. took_s: None if it never began."""
        self._running[client] -= 1
        self._tidy(client)
        if took_s is None:
            return
        until = now + LIMITED_S if took_s > SLOW_S else self._limited_until.get(client, now)
        self._limited_until[client] = until
        self._limited_until.move_to_end(client)
        if len(self._limited_until) > MAX_CLIENTS:
            self._limited_until.popitem(last=False)

    def clear(self) -> list[T]:
        """Removes and returns all waiting items."""
        items = [item for line in self._waiting.values() for item in line]
        for client in list(self._waiting):
            self._waiting[client].clear()
            self._tidy(client)
        self._count = 0
        return items

    def _tidy(self, client: str) -> None:
        if not self._waiting.get(client):
            self._waiting.pop(client, None)
        if not self._running[client]:
            del self._running[client]
        if client not in self._waiting and client not in self._running:
            self._ranks.pop(client, None)

    def _may_run(self, client: str, now: float) -> bool:
        if self._running[client] < self._reserved_from or now >= self._shared_until:
            return True
        return self._limited_until.get(client, now + LIMITED_S) <= now


_Key = tuple[int, bytes]


class Quarantine:
    """Bounded set of crashing images by content hash. An image is hashed only if an entry has the same size."""

    def __init__(self, *, max_entries: int = 1024, retention_s: float = 600.0) -> None:
        self._max_entries = max_entries
        self._retention_s = retention_s
        self._expires_at: OrderedDict[_Key, float] = OrderedDict()
        self._sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._expires_at)

    def add(self, data: bytes | memoryview, now: float) -> None:
        """Quarantines the image until now + retention_s."""
        key = _key(data)
        self._drop(key)
        while len(self._expires_at) >= self._max_entries:
            self._drop(next(iter(self._expires_at)))
        self._expires_at[key] = now + self._retention_s
        self._sizes[key[0]] += 1

    def holds(self, data: bytes | memoryview, now: float) -> bool:
        """Whether it was added less than retention_s ago."""
        if len(data) not in self._sizes:
            return False
        key = _key(data)
        expires_at = self._expires_at.get(key)
        if expires_at is None:
            return False
        if expires_at <= now:
            self._drop(key)
            return False
        return True

    def _drop(self, key: _Key) -> None:
        if self._expires_at.pop(key, None) is None:
            return
        self._sizes[key[0]] -= 1
        if self._sizes[key[0]] == 0:
            del self._sizes[key[0]]


def _key(data: bytes | memoryview) -> _Key:
    return len(data), hashlib.blake2b(data, digest_size=16).digest()
