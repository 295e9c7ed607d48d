"""A source's frame rate, and frozen pictures. No I/O, no clock."""

from collections import deque

WINDOW_S = 3.0
_BUCKET_S = 0.5
MARGIN_FPS = 10.0  # tolerated above the expected rate
RUNAWAY_S = 3  # consecutive whole seconds
CATCH_UP_S = 10.0  # frames late by up to this may arrive faster: the machine was busy


_SPREAD_S = 1.0
_GOLDEN = 0.618033988749895  # its multiples are spread evenly, however many there are


def start_offset_s(number: int) -> float:
    """Delay in seconds, below 1, before the number-th of many sources begins, so that their frames do not coincide."""
    return number * _GOLDEN % 1.0 * _SPREAD_S


class Pace:
    """Frame rate of one process."""

    def __init__(self) -> None:
        self._begun_at: float | None = None
        self._buckets: deque[tuple[float, int]] = deque()
        self._second, self._in_second, self._seconds_too_many = 0, 0, 0
        self._owed = 0.0  # expected frames that did not arrive yet

    def count(self, now: float, frames: int, limit_fps: float | None) -> bool:
        """Counts frames. Returns whether each of the last RUNAWAY_S seconds had too many, without late frames."""
        if self._begun_at is None:
            self._begun_at = now
        if self._buckets and now - self._buckets[-1][0] < _BUCKET_S:
            begin, counted = self._buckets[-1]
            self._buckets[-1] = (begin, counted + frames)
        else:
            self._buckets.append((now, frames))
            self._forget(now)
        return self._runs_away(now - self._begun_at, frames, limit_fps)

    def fps(self, now: float) -> float:
        """Frames per second over the last WINDOW_S, or since the first frame."""
        self._forget(now)
        if not self._buckets:
            return 0.0
        return sum(count for _, count in self._buckets) / max(now - self._buckets[0][0], 1.0)

    def _runs_away(self, age_s: float, frames: int, limit_fps: float | None) -> bool:
        second = int(age_s)
        if second != self._second:
            is_too_many = limit_fps is not None and self._settle(second - self._second, limit_fps)
            is_next = second == self._second + 1
            self._seconds_too_many = self._seconds_too_many + 1 if is_too_many and is_next else 0
            self._second, self._in_second = second, 0
        self._in_second += frames
        return self._seconds_too_many >= RUNAWAY_S

    def _settle(self, seconds: int, limit_fps: float) -> bool:
        """Updates the number of late frames after a second; returns whether it had too many."""
        owed = self._owed + seconds * limit_fps - self._in_second
        self._owed = min(max(owed, 0.0), CATCH_UP_S * limit_fps)
        return owed < 0.0 and self._in_second > limit_fps + MARGIN_FPS

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0][0] >= WINDOW_S:
            self._buckets.popleft()


class Stillness:
    """Detects a source that shows the same picture for too long. at: a live source's clock, or a file's pts."""

    def __init__(self, frozen_after_s: float) -> None:
        self._frozen_after_s = frozen_after_s
        self._digest: int | None = None
        self._since = 0.0
        self.is_frozen = False

    def see(self, at: float, digest: int) -> None:
        if digest != self._digest:
            self._digest, self._since, self.is_frozen = digest, at, False
        elif at - self._since >= self._frozen_after_s:
            self.is_frozen = True
