"""What the engine's calls take, learned from those that it answered: t(b) = alpha + beta * b. Sans-IO."""

from collections import deque

from server.batching.delivery import Deliveries
from server.core.batching import Fit

CALLS_FOR_A_FIT = 8
CALLS_A_DRAW = 4  # once the line is known
RESIDUALS = 64  # calls that the guard is taken from
GUARD_QUANTILE = 0.95
MEMORY_CALLS = 16  # of one bin of sizes: how fast it follows
HALF_LIFE_CALLS = 256.0  # of a bin that no call comes to any more
STRANGE_TIMES = 2.0  # as long, or as short, as the line says: not believed at once
SLOW_IN_A_ROW = 3  # are believed: the engine has changed
FAST_IN_A_ROW = 2  # likewise; no accident makes a call fast


class _Bin:
    """Calls of nearly one size: mean rows and seconds, and how much they weigh."""

    __slots__ = ("calls", "rows", "seconds", "seen_at")

    def __init__(self) -> None:
        self.rows = 0.0
        self.seconds = 0.0
        self.calls = 0
        self.seen_at = 0

    def learn(self, rows: float, seconds: float, at: int) -> None:
        self.calls = min(self.calls + 1, MEMORY_CALLS)
        self.rows += (rows - self.rows) / self.calls
        self.seconds += (seconds - self.seconds) / self.calls
        self.seen_at = at


class ServiceTimes:
    """The calls that were seen, by size. A single strange call moves nothing; three in a row are a changed engine."""

    def __init__(self) -> None:
        self.fit: Fit | None = None
        self._bins: dict[int, _Bin] = {}
        self._calls = 0
        self._early: list[tuple[int, float]] = []
        self._strange: list[tuple[int, float]] = []
        self._is_fast = False
        self._is_changed = False
        self._deliveries = Deliveries()
        self._residuals: deque[float] = deque(maxlen=RESIDUALS)

    @property
    def empty_call_s(self) -> float:
        """What a call of no rows takes; while there is no line at most what calls take, and 0 before any."""
        if self.fit is not None:
            return self.fit.alpha_s
        return sorted(seconds for _, seconds in self._early)[len(self._early) // 2] if self._early else 0.0

    def least_s(self, rows: int) -> float:
        """What a call of so many rows takes at least, while there is no line; 0 where too few calls tell."""
        last = self._early[-CALLS_FOR_A_FIT:]
        if self.fit is not None or len(last) < CALLS_FOR_A_FIT or rows < min(size for size, _ in last):
            return 0.0
        return sorted(seconds for _, seconds in last)[len(last) // 2]

    @property
    def is_doubted(self) -> bool:
        """Whether the last call was far quicker than the line says: it may be of an engine that was."""
        return self._is_fast and bool(self._strange)

    def learn(self, rows: int, seconds: float) -> None:
        """One call of so many rows took so long in the engine."""
        self._calls += 1
        fit = self.fit
        if fit is None:
            self._begin(rows, seconds)
            return
        expected_s = fit.seconds(rows)
        self._residuals.append(seconds - expected_s)
        if expected_s / STRANGE_TIMES <= seconds <= expected_s * STRANGE_TIMES:
            self._strange.clear()
            self._take(rows, seconds)
        else:
            self._doubt(fit, rows, seconds)
        if self._calls < RESIDUALS or self._calls % CALLS_A_DRAW == 0 or self._is_changed:
            self._draw()

    def delivered(self, rows: int, seconds: float) -> None:
        """So long after the engine's answer all callers of that call had theirs."""
        self._deliveries.learn(rows, seconds)

    def _begin(self, rows: int, seconds: float) -> None:
        """Calls before the first line; those that are far above the usual for their size do not come in."""
        self._early.append((rows, seconds))
        del self._early[:-RESIDUALS]
        if len(self._early) < CALLS_FOR_A_FIT or len({rows for rows, _ in self._early}) == 1:
            return
        usual_s = sorted(seconds for _, seconds in self._early)[len(self._early) // 2]
        believed = [(size, took_s) for size, took_s in self._early if took_s <= usual_s * 8]
        if len({size for size, _ in believed}) == 1:
            return
        for size, took_s in believed:
            self._take(size, took_s)
        self._early.clear()
        self._draw()
        if self.fit is not None:
            self._residuals.extend(took_s - self.fit.seconds(size) for size, took_s in believed)

    def _doubt(self, fit: Fit, rows: int, seconds: float) -> None:
        is_fast = seconds < fit.seconds(rows)
        if self._strange and is_fast != self._is_fast:
            self._strange.clear()
        self._is_fast = is_fast
        self._strange.append((rows, seconds))
        if len(self._strange) < (FAST_IN_A_ROW if is_fast else SLOW_IN_A_ROW):
            return
        ratio = sorted(took_s / fit.seconds(size) for size, took_s in self._strange)[len(self._strange) // 2]
        for old in self._bins.values():
            old.seconds *= ratio
            old.calls = 1
        for size, took_s in self._strange:
            self._take(size, took_s)
        self._strange.clear()
        self._residuals.clear()
        self._is_changed = True

    def _take(self, rows: int, seconds: float) -> None:
        number = _bin_of(rows)
        found = self._bins.get(number)
        if found is None:
            found = self._bins[number] = _Bin()
        found.learn(rows, seconds, self._calls)

    def _draw(self) -> None:
        """Weighted least squares through the bins' means; neither a negative start nor a falling line."""
        weight = sum_b = sum_t = 0.0
        points = []
        for one in self._bins.values():
            w = one.calls * 0.5 ** ((self._calls - one.seen_at) / HALF_LIFE_CALLS)
            points.append((w, one.rows, one.seconds))
            weight += w
            sum_b += w * one.rows
            sum_t += w * one.seconds
        self._is_changed = False
        mean_b, mean_t = sum_b / weight, sum_t / weight
        spread = sum(w * (b - mean_b) ** 2 for w, b, _ in points)
        slope = sum(w * (b - mean_b) * (t - mean_t) for w, b, t in points) / spread if spread > 1e-9 else 0.0
        beta_s = min(max(slope, 0.0), mean_t / mean_b)
        self.fit = Fit(mean_t - beta_s * mean_b, beta_s, self._guard(), self._calls, self._deliveries.row_s)

    def _guard(self) -> float:
        ordered = sorted(self._residuals)
        if not ordered:
            return 0.0
        return max(ordered[min(int(len(ordered) * GUARD_QUANTILE), len(ordered) - 1)], 0.0)


def _bin_of(rows: int) -> int:
    """Sizes of one bin are within an eighth of each other; small sizes have one each."""
    if rows <= 8:
        return rows
    exponent = rows.bit_length() - 4
    return (exponent << 4) + (rows >> exponent)
