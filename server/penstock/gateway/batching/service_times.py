"""Learns engine times, t(b) = alpha + beta * b, and the batch size limit. Sans-IO."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from penstock.protocol.inference import EngineTimeFit

DECREASE = 0.9


class BatchSizeLimit:
    """Batch size limit: doubles, then additive increase, multiplicative decrease. Out of memory halves it."""

    def __init__(self, max_rows: int) -> None:
        self.by_memory = max_rows
        self._max_rows = max_rows
        self._by_time = 1
        self._is_doubling = True

    @property
    def rows(self) -> int:
        """Limit for batches with a deadline while there is no fit. `by_memory` limits every batch."""
        return min(self._by_time, self.by_memory)

    def answered(self, rows: int, seconds: float, budget_s: float | None) -> None:
        """Records a call. budget_s: the time it should take at most."""
        if rows >= self.by_memory:
            self.by_memory = min(rows + 1, self._max_rows)
        if budget_s is not None and seconds > budget_s:
            self._is_doubling = False
            self._by_time = max(int(min(rows, self._by_time) * DECREASE), 1)
        elif rows >= self._by_time:
            self._by_time = min(rows * 2 if self._is_doubling else rows + 1, self._max_rows)

    def out_of_memory(self, rows: int) -> None:
        """Records that a call of this size exceeded the engine's memory."""
        self.by_memory = max(min(rows, self.by_memory) // 2, 1)


DELIVERY_BATCHES = 16  # batches of the average
MIN_DELIVERIES = 4  # batches before there is an average


class DeliveryTimes:
    """Seconds per row from the engine's response to the clients', over the last batches; robust to outliers."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque(maxlen=DELIVERY_BATCHES)

    def learn(self, rows: int, seconds: float) -> None:
        """Records how long after the engine's response all clients of a batch had theirs."""
        self._recent.append((seconds / rows, rows))

    @property
    def row_s(self) -> float:
        """Median weighted by rows, because other work distorts batches of one row; 0 before MIN_DELIVERIES."""
        if len(self._recent) < MIN_DELIVERIES:
            return 0.0
        ordered = sorted(self._recent)
        half = sum([rows for _, rows in ordered]) / 2
        until = accumulate([rows for _, rows in ordered])
        return next(row_s for (row_s, _), rows in zip(ordered, until, strict=True) if rows >= half)


CALLS_FOR_A_FIT = 8
CALLS_A_DRAW = 4  # calls between two fits
RESIDUALS = 64  # calls of which the guard is computed
GUARD_QUANTILE = 0.95
MEMORY_CALLS = 16  # of one bin: how fast it follows
HALF_LIFE_CALLS = 256.0  # of a bin without new calls
STRANGE_TIMES = 2.0  # times longer or shorter than the fit is an outlier
SLOW_IN_A_ROW = 3  # consecutive outliers mean that the engine has changed
FAST_IN_A_ROW = 2  # fewer, because a single call is rarely too fast by accident


class _Bin:
    """Calls of similar size: mean rows and seconds, and their weight."""

    __slots__ = ("calls", "last_call", "rows", "seconds")

    def __init__(self) -> None:
        self.rows = 0.0
        self.seconds = 0.0
        self.calls = 0
        self.last_call = 0

    def learn(self, rows: float, seconds: float, at: int) -> None:
        self.calls = min(self.calls + 1, MEMORY_CALLS)
        self.rows += (rows - self.rows) / self.calls
        self.seconds += (seconds - self.seconds) / self.calls
        self.last_call = at


class ServiceTimes:
    """Fits engine time to batch size. Ignores single outliers; several in a row mean that the engine has changed."""

    def __init__(self) -> None:
        self.fit: EngineTimeFit | None = None
        self._bins: dict[int, _Bin] = {}
        self._calls = 0
        self._early: list[tuple[int, float]] = []
        self._strange: list[tuple[int, float]] = []
        self._is_fast = False
        self._is_changed = False
        self._deliveries = DeliveryTimes()
        self._residuals: deque[float] = deque(maxlen=RESIDUALS)

    @property
    def empty_call_s(self) -> float:
        """Seconds of a call of no rows. Without a fit an upper bound, or 0 without calls."""
        if self.fit is not None:
            return self.fit.alpha_s
        return sorted(seconds for _, seconds in self._early)[len(self._early) // 2] if self._early else 0.0

    def least_s(self, rows: int) -> float:
        """Least seconds of a call of this size while there is no fit; 0 if unknown."""
        last = self._early[-CALLS_FOR_A_FIT:]
        if self.fit is not None or len(last) < CALLS_FOR_A_FIT or rows < min(size for size, _ in last):
            return 0.0
        return sorted(seconds for _, seconds in last)[len(last) // 2]

    @property
    def may_be_outdated(self) -> bool:
        """Whether the last call was far faster than the fit, so the engine may have changed."""
        return self._is_fast and bool(self._strange)

    def learn(self, rows: int, seconds: float) -> None:
        """Records the engine time of a call."""
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
            self._take_outlier(fit, rows, seconds)
        if self._calls < RESIDUALS or self._calls % CALLS_A_DRAW == 0 or self._is_changed:
            self._draw()

    def delivered(self, rows: int, seconds: float) -> None:
        """Records how long after the engine's response all clients had theirs."""
        self._deliveries.learn(rows, seconds)

    def _begin(self, rows: int, seconds: float) -> None:
        """Collects calls for the first fit, without outliers for their size."""
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

    def _take_outlier(self, fit: EngineTimeFit, rows: int, seconds: float) -> None:
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
        weights = [
            bin_.calls * 0.5 ** ((self._calls - bin_.last_call) / HALF_LIFE_CALLS) for bin_ in self._bins.values()
        ]
        alpha_s, beta_s = line_through(
            [(weight, bin_.rows, bin_.seconds) for weight, bin_ in zip(weights, self._bins.values(), strict=True)]
        )
        self._is_changed = False
        self.fit = EngineTimeFit(alpha_s, beta_s, self._guard(), self._calls, self._deliveries.row_s)

    def _guard(self) -> float:
        ordered = sorted(self._residuals)
        if not ordered:
            return 0.0
        return max(ordered[min(int(len(ordered) * GUARD_QUANTILE), len(ordered) - 1)], 0.0)


def line_through(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """alpha_s and beta_s, both at least 0, by weighted least squares. points: (weight, rows, seconds)."""
    total = sum(weight for weight, _, _ in points)
    mean_rows = sum(weight * rows for weight, rows, _ in points) / total
    mean_s = sum(weight * seconds for weight, _, seconds in points) / total
    spread = sum(weight * (rows - mean_rows) ** 2 for weight, rows, _ in points)
    slope = sum(weight * (rows - mean_rows) * (seconds - mean_s) for weight, rows, seconds in points)
    beta_s = min(max(slope / spread, 0.0), mean_s / mean_rows) if spread > 1e-9 else 0.0
    return mean_s - beta_s * mean_rows, beta_s


def _bin_of(rows: int) -> int:
    """Bin of this size. Sizes in a bin differ by at most an eighth; sizes up to 8 have their own bins."""
    if rows <= 8:
        return rows
    exponent = rows.bit_length() - 4
    return (exponent << 4) + (rows >> exponent)
