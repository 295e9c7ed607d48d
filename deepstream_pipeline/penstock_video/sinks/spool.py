"""Queue of messages for a broker: ordered, bounded in messages and bytes, oldest dropped first. No I/O, no clock."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class Message:
    """A message for a broker. key: the source's ID; messages of one key stay in order. id: unique, the same when the
    message is resent. kind: "events" or "objects". body: one line of JSON without a newline."""

    key: str
    id: str
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True)
class SpoolStatistics:
    """depth, size_bytes: of waiting and taken messages. Totals: written = sent + dropped + refused + depth. dropped:
    lost for lack of room. refused: rejected by the broker for good (a webhook's dead letters)."""

    depth: int
    size_bytes: int
    written: int
    sent: int
    dropped: int
    refused: int


class Spool:
    """A bounded queue of messages for one broker. Not thread-safe: the caller locks. When full, it drops and counts the
    oldest waiting message. Taken messages, which may be at the broker, are not dropped. A message that alone exceeds
    the bound is dropped itself."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        if max_messages < 1 or max_bytes < 1:
            raise ValueError(f"a spool holds at least one message and one byte, not {max_messages} and {max_bytes}")
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[Message] = deque()
        self._taken: dict[int, Message] = {}  # by identity: settling needs the same object
        self._size_bytes = 0
        self._put = self._sent = self._dropped = self._refused = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._taken)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def has_waiting(self) -> bool:
        """Whether `take` would return messages."""
        return bool(self._waiting)

    def put(self, message: Message) -> int:
        """Adds a message; returns how many were dropped, possibly this one."""
        self._put += 1
        size = len(message.body)
        dropped = 0
        if size <= self._max_bytes:
            while self._waiting and not self._has_room(size):
                self._size_bytes -= len(self._waiting.popleft().body)
                dropped += 1
        if self._has_room(size):
            self._waiting.append(message)
            self._size_bytes += size
        else:
            dropped += 1
        self._dropped += dropped
        return dropped

    def take(self, max_messages: int, max_bytes: int) -> tuple[Message, ...]:
        """Takes the oldest waiting messages, within both limits but at least one; empty if none waits."""
        size = count = 0
        for message in islice(self._waiting, max_messages):
            size += len(message.body)
            if count and size > max_bytes:
                break
            count += 1
        taken = tuple(self._waiting.popleft() for _ in range(count))
        self._taken.update((id(message), message) for message in taken)
        return taken

    def done(self, messages: Collection[Message]) -> None:
        """Removes delivered messages."""
        self._settle(messages)
        self._sent += len(messages)

    def refuse(self, messages: Collection[Message]) -> None:
        """Drops and counts messages that the broker rejects for good."""
        self._settle(messages)
        self._refused += len(messages)

    def put_back(self, messages: Sequence[Message]) -> None:
        """Puts undelivered messages back to the front, in the given order."""
        for message in messages:
            del self._taken[id(message)]
        self._waiting.extendleft(reversed(messages))

    def put_back_all(self) -> None:
        """Puts all taken messages back, in their old order."""
        self.put_back(tuple(self._taken.values()))

    def statistics(self) -> SpoolStatistics:
        return SpoolStatistics(len(self), self._size_bytes, self._put, self._sent, self._dropped, self._refused)

    def _has_room(self, size_bytes: int) -> bool:
        return len(self) < self._max_messages and self._size_bytes + size_bytes <= self._max_bytes

    def _settle(self, messages: Collection[Message]) -> None:
        for message in messages:
            self._size_bytes -= len(self._taken.pop(id(message)).body)
