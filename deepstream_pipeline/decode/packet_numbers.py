"""Which packet a picture came of, and which packets gave none. Sans-IO."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

MOST_REORDERED = 16  # pictures: no stream shows one later than so many that were coded after it
MOST_AWAITED = 32  # packets whose pictures did not come out yet


@dataclass(frozen=True, slots=True)
class Sent:
    """What was known of a packet. raw_s: the stream's own seconds. is_leading: it is shown before the keyframe that it
    was coded after. lost: so many packets gave no picture before this one came out, not told yet. names: what its
    decoder may call the picture, counting those that it decoded."""

    raw_s: float | None
    is_key: bool
    is_corrupt: bool
    is_leading: bool = False
    lost: int = 0
    names: tuple[int, ...] = ()


class PacketNumbers:
    """A decoder's packets, in the order of decoding: 0, 1, 2 …"""

    def __init__(self, lost: int = 0) -> None:
        """lost: packets that gave no picture, to be told with the first."""
        self._next = 0
        self._awaited: dict[int, Sent] = {}
        self._late: dict[int, Sent] = {}  # given up, and may come all the same
        self._key_s: float | None = None
        self._untold = lost
        self._missing = 0  # of this decoder's packets
        self._are_times_shown = True  # False where a stream's times turned out to be those of decoding

    def anew(self) -> "PacketNumbers":
        """For another decoder."""
        return PacketNumbers(self._untold)

    def next(self, sent: Sent) -> int:
        """The number of a packet that is decoded now."""
        number, self._next = self._next, self._next + 1
        if sent.is_key:
            self._key_s = sent.raw_s
        elif sent.raw_s is not None and self._key_s is not None and sent.raw_s < self._key_s:
            sent = replace(sent, is_leading=True)
        self._awaited[number] = sent
        return number

    def came_out(self, number: int) -> Sent | None:
        """Of the picture of that packet; None where it came already, or of no packet."""
        sent = self._awaited.pop(number, None)
        if sent is None:
            sent = self._late.pop(number, None)
            if sent is None:
                return None
            self._are_times_shown = False
            self._missing -= 1
        for other in [*self._passed_over(number, sent)]:
            self._lose(other)
        lost, self._untold = self._untold, 0
        names = (number,) if not self._missing else (number - self._missing, number)
        return replace(sent, lost=lost, names=names)

    def lose_oldest(self) -> bool:
        """Give the oldest up where too many are awaited; whether it was."""
        if len(self._awaited) <= MOST_AWAITED:
            return False
        self._lose(next(iter(self._awaited)))
        return True

    def lose_all(self) -> None:
        """Nothing more comes of what was given."""
        for number in list(self._awaited):
            self._lose(number)

    def told_lost(self) -> None:
        """One of the lost was told otherwise."""
        self._untold = max(self._untold - 1, 0)

    def forget(self) -> None:
        """What is awaited is of no interest any more, and none of it counts as lost."""
        self._missing += len(self._awaited)
        self._awaited.clear()
        self._late.clear()
        self._untold, self._key_s = 0, None

    def _passed_over(self, number: int, sent: Sent) -> Iterator[int]:
        """Those before it that were to be shown before it, too: all of them, where it is a keyframe."""
        for other, awaited in self._awaited.items():
            if other >= number:
                return
            is_before = sent.is_key or (self._are_times_shown and _is_before(awaited, sent))
            if is_before or number - other > MOST_REORDERED:
                yield other

    def _lose(self, number: int) -> None:
        sent = self._awaited.pop(number)
        self._missing += 1
        self._untold += not sent.is_leading
        self._late[number] = sent
        while len(self._late) > MOST_REORDERED:
            del self._late[next(iter(self._late))]


def _is_before(first: Sent, second: Sent) -> bool:
    return first.raw_s is not None and second.raw_s is not None and first.raw_s < second.raw_s
