"""The presentation times of one source, made to rise strictly whatever its packets say. Sans-IO."""

import math

WRAP_S = 2**33 / 90_000  # MPEG's clock has 33 bits of 90 kHz
MOST_STEP_S = 30.0  # largest step of a live source beyond the elapsed time; a larger one is a clock jump
_LEAST_STEP_S = 0.001
_SHAKEN_S = 1.0  # backward: so little is a frame told late or twice, more is a jump,
_MOST_SHAKEN = 2  # and so are more such frames in a row


class Timeline:
    """Converts stream times to source times, in seconds. While stream times increase, their differences are preserved.

    A file's step may be of any length: a time-lapse has a frame a minute or an hour. A live stream cannot show more
    time than has passed: a larger step is a jump of the camera's clock, and counts as one interval.
    Other cases: a frame without a time adds one interval. A repeated or slightly late time adds a millisecond, and the
    times after it are not shifted. A jump backward counts as one interval. After a wraparound of a 33-bit clock the
    difference is computed as if there were none.
    """

    def __init__(self, first_pts_s: float = 0.0, interval_s: float = 0.04) -> None:
        """first_pts_s: what the first frame gets. interval_s: between two frames, until it is known better."""
        self._next_pts_s = first_pts_s
        self._interval_s = _sane_interval(interval_s)
        self._last: float | None = None  # of the source
        self._last_raw: float | None = None  # of the stream
        self._last_now: float | None = None
        self._last_step_s = 0.0
        self._shift = 0.0
        self._shaken = 0

    @property
    def last_pts_s(self) -> float | None:
        """What the last frame got; None before the first."""
        return self._last

    def begin(self, interval_s: float | None = None, gap_s: float | None = None) -> None:
        """The stream begins anew (looped, opened again): its next frame comes gap_s, or an interval, after the last."""
        if interval_s is not None:
            self._interval_s = _sane_interval(interval_s)
        if self._last is not None:
            self._next_pts_s = self._last + max(self._interval_s if gap_s is None else gap_s, _LEAST_STEP_S)
        self._last_raw = None

    def stamp(self, raw_s: float | None, now: float | None = None) -> float:
        """The source time of a frame with this stream time, or None. Strictly increasing.

        now: monotonic seconds at which a live source's frame arrived; None for a file.
        """
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
        return self._told(raw_s + self._shift)

    def _untimed(self) -> float:
        pts_s = self._told(self._next_pts_s)
        self._next_pts_s = pts_s + self._interval_s
        if self._last_raw is not None:
            self._last_raw += self._interval_s
        return pts_s

    def _anchored(self, raw_s: float) -> float:
        self._last_raw, self._shaken = raw_s, 0
        self._shift = self._next_pts_s - raw_s
        return self._told(self._next_pts_s)

    def _told(self, pts_s: float) -> float:
        if self._last is not None and pts_s <= self._last:
            pts_s = self._last + _LEAST_STEP_S
        self._last = pts_s
        return pts_s


def _sane_interval(interval_s: float) -> float:
    return min(max(interval_s, _LEAST_STEP_S), 1.0) if interval_s == interval_s else 0.04
