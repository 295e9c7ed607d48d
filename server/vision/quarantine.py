"""Images that have killed a decoder, remembered for a while. Sans-IO."""

import hashlib
from collections import Counter, OrderedDict

_Key = tuple[int, bytes]


class Quarantine:
    """A bounded memory of poison, by content; the oldest goes first.

    An image is hashed only where a remembered one has the same size, so that innocent traffic pays a set look-up.
    """

    def __init__(self, *, max_entries: int = 1024, keep_s: float = 600.0) -> None:
        self._max_entries = max_entries
        self._keep_s = keep_s
        self._expires_at: OrderedDict[_Key, float] = OrderedDict()
        self._sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._expires_at)

    def add(self, data: bytes | memoryview, now: float) -> None:
        """Remember it until now + keep_s."""
        key = _key(data)
        self._drop(key)
        while len(self._expires_at) >= self._max_entries:
            self._drop(next(iter(self._expires_at)))
        self._expires_at[key] = now + self._keep_s
        self._sizes[key[0]] += 1

    def holds(self, data: bytes | memoryview, now: float) -> bool:
        """Whether it was added less than keep_s ago."""
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
