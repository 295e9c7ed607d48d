"""Makes presentation times strictly increasing, drops damaged pictures, and matches pictures to packets. Sans-IO."""

import math
from collections.abc import Iterator
from enum import Enum, auto
from typing import NamedTuple

WRAP_S = 2**33 / 90_000  # MPEG's clock has 33 bits of 90 kHz
MOST_STEP_S = 30.0  # maximum step of a live source beyond the elapsed time; a larger one is a clock jump
_LEAST_STEP_S = 0.001
_SHAKEN_S = 1.0  # backward: up to this is a late or repeated frame, more is a jump,
_MOST_SHAKEN = 2  # and so are more such consecutive frames


class PtsTimeline:
    """Converts stream times to source times, in seconds. While stream times increase, their differences are preserved.

    A file's step may have any length (time-lapse). A live step longer than the elapsed time is a clock jump and counts
    as one interval, as do a jump backward and a frame without a time. A repeated or slightly late time adds a
    millisecond. Wraparounds of a 33-bit clock are corrected.
    """

    def __init__(self, first_pts_s: float = 0.0, interval_s: float = 0.04) -> None:
        """first_pts_s: of the first frame. interval_s: between two frames, until it is measured."""
        self._next_pts_s = first_pts_s
        self._interval_s = _sane_interval(interval_s)
        self._last: float | None = None  # of the source
        self._last_raw: float | None = None  # of the stream
        self._last_now: float | None = None
        self._last_step_s = 0.0
        self._shift = 0.0
        self._shaken = 0

    def begin(self, interval_s: float | None = None, gap_s: float | None = None) -> None:
        """Restarts the stream (looped, reopened): its next frame comes gap_s, or an interval, after the last."""
        if interval_s is not None:
            self._interval_s = _sane_interval(interval_s)
        if self._last is not None:
            self._next_pts_s = self._last + max(self._interval_s if gap_s is None else gap_s, _LEAST_STEP_S)
        self._last_raw = None

    def stamp(self, raw_s: float | None, now: float | None = None) -> float:
        """Source time, strictly increasing. now: monotonic seconds of a live source's frame; None for a file."""
        passed_s = math.inf if now is None or self._last_now is None else max(now - self._last_now, 0.0)
        self._last_now = now
        if self._last is not None and self._last_raw is not None:
            self._next_pts_s = self._last + self._interval_s
        if raw_s is None:
            return self._untimed()
        if self._last_raw is None:
            return self._anchored(raw_s)
        if raw_s < self._last_raw and 0.0 < raw_s - self._last_raw + WRAP_S <= max(MOST_STEP_S, 2 * self._last_step_s):
            self._last_raw -= WRAP_S
            self._shift += WRAP_S
        step_s = raw_s - self._last_raw
        self._shaken = self._shaken + 1 if step_s <= 0.0 else 0
        if not -_SHAKEN_S <= step_s <= MOST_STEP_S + passed_s or self._shaken > _MOST_SHAKEN:
            return self._anchored(raw_s)
        self._last_raw, self._last_step_s = max(raw_s, self._last_raw), max(step_s, 0.0)
        if 0.0 < step_s < 1.0:
            self._interval_s += (_sane_interval(step_s) - self._interval_s) / 8
        return self._increasing(raw_s + self._shift)

    def _untimed(self) -> float:
        pts_s = self._increasing(self._next_pts_s)
        self._next_pts_s = pts_s + self._interval_s
        if self._last_raw is not None:
            self._last_raw += self._interval_s
        return pts_s

    def _anchored(self, raw_s: float) -> float:
        self._last_raw, self._shaken = raw_s, 0
        self._shift = self._next_pts_s - raw_s
        return self._increasing(self._next_pts_s)

    def _increasing(self, pts_s: float) -> float:
        if self._last is not None and pts_s <= self._last:
            pts_s = self._last + _LEAST_STEP_S
        self._last = pts_s
        return pts_s


def _sane_interval(interval_s: float) -> float:
    return min(max(interval_s, _LEAST_STEP_S), 1.0) if interval_s == interval_s else 0.04


MOST_DROPPED = 300  # frames: a stream with gradual refresh never sends a keyframe


class Verdict(Enum):
    """CLEAN: undamaged. CORRUPT: shown and marked. DROPPED: not shown."""

    CLEAN = auto()
    CORRUPT = auto()
    DROPPED = auto()


class Damage:
    """Tracks damage: frames are dropped after a lost packet, and marked after a repaired frame, until a keyframe."""

    def __init__(self) -> None:
        self.bad_packets = 0
        self._is_tainted = False
        self._dropped: int | None = None  # since a packet was lost; None if none was

    def packet_failed(self) -> None:
        """Notes a packet that was damaged or could not be decoded."""
        self.bad_packets += 1
        if self._dropped is None:
            self._dropped = 0

    def begin(self) -> None:
        """Restarts the stream, at a keyframe."""
        self._is_tainted, self._dropped = False, None

    def judge(self, *, is_key: bool, is_corrupt: bool) -> Verdict:
        """Judges the next frame. is_key: it is a keyframe. is_corrupt: the decoder repaired it."""
        if is_key:
            self._is_tainted, self._dropped = is_corrupt, None
        elif is_corrupt:
            self._is_tainted = True
        if self._dropped is not None and self._dropped < MOST_DROPPED:
            self._dropped += 1
            return Verdict.DROPPED
        if self._dropped is not None:
            self._is_tainted, self._dropped = True, None
        return Verdict.CORRUPT if self._is_tainted else Verdict.CLEAN


MOST_LATE = 16  # pictures counted as lost that may still come
MOST_AWAITED = 32  # packets whose pictures did not come yet
_PER_SECOND = 1_000_000
_MOST_S = 1e11  # timestamps have 64 bits; larger times of a stream are invalid


class Sent(NamedTuple):
    """A decoded packet. raw_s: the stream's seconds. is_leading: shown before the keyframe that precedes it in coding
    order. lost: unreported packets before it without a picture."""

    raw_s: float | None
    is_key: bool
    is_corrupt: bool
    is_leading: bool = False
    lost: int = 0


class PacketNumbers:
    """A decoder's packets, by timestamp."""

    def __init__(self, lost: int = 0) -> None:
        """lost: packets without a picture, to be reported with the first."""
        self._awaited: dict[int, Sent] = {}
        self._late: dict[int, Sent] = {}
        self._offset = 0  # from the stream's time to the timestamp
        self._highest = self._shown = -1
        self._key: int | None = None  # timestamp of the last keyframe
        self._untold = lost

    def anew(self) -> "PacketNumbers":
        """Resets for another decoder."""
        return PacketNumbers(self._untold)

    def next(self, sent: Sent) -> int:
        """The timestamp for the packet that is decoded now."""
        stamp = self._stamp_of(sent)
        if sent.is_key:
            self._key = stamp
        is_leading = self._key is not None and stamp < self._key
        self._awaited[stamp] = sent._replace(is_leading=is_leading)
        self._highest = max(self._highest, stamp)
        return stamp

    def came_out(self, stamp: int) -> Sent | None:
        """The packet of the picture with this timestamp; None for a repeated or unknown one."""
        self._shown = max(self._shown, stamp)
        sent = self._awaited.pop(stamp, None)
        if sent is None:
            sent = self._late.pop(stamp, None)
            if sent is None:
                return None
        for other in [*self._passed_over(stamp)]:
            self._lose(other)
        lost, self._untold = self._untold, 0
        return sent._replace(lost=lost)

    def lose_oldest(self) -> bool:
        """Drops the oldest packet if too many are awaited; returns whether it did."""
        if len(self._awaited) <= MOST_AWAITED:
            return False
        self._lose(next(iter(self._awaited)))
        return True

    def lose_all(self) -> None:
        """Counts all awaited packets as lost."""
        for stamp in list(self._awaited):
            self._lose(stamp)

    def report_lost(self) -> None:
        """Subtracts a lost packet that was reported otherwise."""
        self._untold = max(self._untold - 1, 0)

    def forget(self) -> None:
        """Forgets awaited packets without counting them as lost."""
        self._awaited.clear()
        self._late.clear()
        self._untold, self._key = 0, None

    def _stamp_of(self, sent: Sent) -> int:
        """Display time: a keyframe comes after all packets before it, a packet without time in coding order, and none
        before a picture that already came out (the stream's clock went back)."""
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
        """Awaited packets that should be shown before it."""
        return (other for other in self._awaited if other < stamp)

    def _lose(self, stamp: int) -> None:
        sent = self._awaited.pop(stamp)
        self._untold += not sent.is_leading
        self._late[stamp] = sent
        while len(self._late) > MOST_LATE:
            del self._late[next(iter(self._late))]
