"""Which packet a picture came of, and which packets gave none. Sans-IO.

The card's decoder keeps the stamps of the pictures that it holds in a heap: the picture that is shown next gets the
lowest of them, whichever packet it came of (measured on an H200, H.264 and HEVC with B-frames). So a packet's stamp
says its place in the order of showing: its time, moved on wherever the stream's clock goes back.
"""

from collections.abc import Iterator
from typing import NamedTuple

MOST_LATE = 16  # pictures that were given up, and may come all the same
MOST_AWAITED = 32  # packets whose pictures did not come out yet
_PER_SECOND = 1_000_000
_MOST_S = 1e11  # a stamp is a number of 64 bits; what a stream says beyond that is no time


class Sent(NamedTuple):
    """What was known of a packet. raw_s: the stream's own seconds. is_leading: it is shown before the keyframe that it
    was coded after. lost: so many packets gave no picture before this one came out, not told yet. number: its place in
    the order of decoding. names: what its decoder may call the picture, counting those that it decoded."""

    raw_s: float | None
    is_key: bool
    is_corrupt: bool
    is_leading: bool = False
    lost: int = 0
    number: int = 0
    names: tuple[int, ...] = ()


class PacketNumbers:
    """A decoder's packets, by their stamps."""

    def __init__(self, lost: int = 0) -> None:
        """lost: packets that gave no picture, to be told with the first."""
        self._next = 0
        self._awaited: dict[int, Sent] = {}
        self._late: dict[int, Sent] = {}
        self._offset = 0  # from the stream's time to the stamp
        self._highest = self._shown = -1
        self._key: int | None = None  # the stamp of the last keyframe
        self._untold = lost
        self._missing = 0  # of this decoder's packets

    def anew(self) -> "PacketNumbers":
        """For another decoder."""
        return PacketNumbers(self._untold)

    def next(self, sent: Sent) -> int:
        """The stamp of a packet that is decoded now."""
        stamp = self._stamp_of(sent)
        if sent.is_key:
            self._key = stamp
        is_leading = self._key is not None and stamp < self._key
        self._awaited[stamp] = sent._replace(is_leading=is_leading, number=self._next)
        self._next, self._highest = self._next + 1, max(self._highest, stamp)
        return stamp

    def came_out(self, stamp: int) -> Sent | None:
        """Of the picture with that stamp; None where it came already, or of no packet."""
        self._shown = max(self._shown, stamp)
        sent = self._awaited.pop(stamp, None)
        if sent is None:
            sent = self._late.pop(stamp, None)
            if sent is None:
                return None
            self._missing -= 1
        for other in [*self._passed_over(stamp)]:
            self._lose(other)
        lost, self._untold = self._untold, 0
        names = (sent.number,) if not self._missing else (sent.number - self._missing, sent.number)
        return sent._replace(lost=lost, names=names)

    def lose_oldest(self) -> bool:
        """Give the oldest up where too many are awaited; whether it was."""
        if len(self._awaited) <= MOST_AWAITED:
            return False
        self._lose(next(iter(self._awaited)))
        return True

    def lose_all(self) -> None:
        """Nothing more comes of what was given."""
        for stamp in list(self._awaited):
            self._lose(stamp)

    def told_lost(self) -> None:
        """One of the lost was told otherwise."""
        self._untold = max(self._untold - 1, 0)

    def forget(self) -> None:
        """What is awaited is of no interest any more, and none of it counts as lost."""
        self._missing += len(self._awaited)
        self._awaited.clear()
        self._late.clear()
        self._untold, self._key = 0, None

    def _stamp_of(self, sent: Sent) -> int:
        """A keyframe is shown after all that was coded before it; what has no time, as it was coded; and nothing is
        shown before what came out already: there the stream's clock went back."""
        if sent.raw_s is None or abs(sent.raw_s) > _MOST_S:
            return self._highest + 1
        stamp = self._offset + round(sent.raw_s * _PER_SECOND)
        if stamp <= (self._highest if sent.is_key else self._shown):
            self._offset += self._highest + 1 - stamp
            stamp = self._highest + 1
        while stamp in self._awaited:
            stamp += 1
        return stamp

    def _passed_over(self, stamp: int) -> Iterator[int]:
        """Those that were to be shown before it."""
        return (other for other in self._awaited if other < stamp)

    def _lose(self, stamp: int) -> None:
        sent = self._awaited.pop(stamp)
        self._missing += 1
        self._untold += not sent.is_leading
        self._late[stamp] = sent
        while len(self._late) > MOST_LATE:
            del self._late[next(iter(self._late))]
