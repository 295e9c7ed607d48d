"""Which replica of an engine is left out because it does worse than the others. Sans-IO."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutlierOptions:
    """When a replica is ejected, and for how long.

    failures: in a row; or min_calls, of which the share `rate` failed. Either way its share of failures (all of them,
    in a row) must exceed that of the others by `margin`: what fails everywhere is no replica's fault. Calls count half
    after half_life_s. The first ejection takes first_s, each further one twice as long, up to max_s; one is forgiven
    for every forgiven_s in service. max_ejected: share of all replicas.
    """

    failures: int = 5
    min_calls: float = 20.0
    rate: float = 0.5
    margin: float = 0.3
    half_life_s: float = 10.0
    first_s: float = 5.0
    max_s: float = 300.0
    forgiven_s: float = 60.0
    max_ejected: float = 0.5


@dataclass(slots=True)
class _Record:
    """good, bad: calls of late, fading. trial: it is back and has not answered well yet."""

    good: float = 0.0
    bad: float = 0.0
    faded_at: float = 0.0
    failures: int = 0
    is_ejected: bool = False
    until: float = 0.0
    ejections: int = 0
    level: int = 0
    is_on_trial: bool = False

    def rate(self) -> float:
        calls = self.good + self.bad
        return self.bad / calls if calls else 0.0


class Outliers:
    """Over `count` replicas, known by their index. now: monotonic seconds.

    Each ejection is shortened by a random part of up to a fifth. uniform: random numbers in [0, 1).
    """

    def __init__(
        self, count: int, options: OutlierOptions | None = None, *, uniform: Callable[[], float] = random.random
    ) -> None:
        self._options = options or OutlierOptions()
        self._uniform = uniform
        self._records = [_Record() for _ in range(count)]
        self.is_calm = True  # none is ejected or on trial
        self._max_ejected = min(int(count * self._options.max_ejected), count - 1)

    def is_ejected(self, index: int, now: float) -> bool:
        """Whether calls are to go elsewhere. When its time is over the replica is on trial."""
        record = self._records[index]
        if record.is_ejected and now >= record.until:
            record.is_ejected, record.is_on_trial = False, True
            record.good = record.bad = 0.0
            record.failures = self._options.failures - 1
        return record.is_ejected

    def is_on_trial(self, index: int) -> bool:
        """Whether it is back from an ejection without a good answer yet: one call at a time is enough."""
        return self._records[index].is_on_trial

    def succeeded(self, index: int, now: float) -> None:
        """A call was answered well."""
        record = self._faded(index, now)
        record.good += 1.0
        record.failures = 0
        if record.is_on_trial:
            record.is_on_trial = False
            self.is_calm = not any(other.is_ejected or other.is_on_trial for other in self._records)

    def failed(self, index: int, now: float) -> bool:
        """A call failed or was not answered. Whether that ejects the replica."""
        record = self._faded(index, now)
        record.bad += 1.0
        record.failures += 1
        if self.is_ejected(index, now) or not self._stands_out(index, now):
            return False
        if sum(self.is_ejected(other, now) for other in range(len(self._records))) >= self._max_ejected:
            return False
        self._eject(record, now)
        return True

    def try_again(self, index: int, now: float) -> None:
        """It was away and is back: what it did before says little, so an ejection ends now, on trial."""
        record = self._records[index]
        if record.is_ejected:
            record.until = min(record.until, now)

    def ejections(self, index: int) -> int:
        """How often it was ejected."""
        return self._records[index].ejections

    def _stands_out(self, index: int, now: float) -> bool:
        record, options = self._records[index], self._options
        is_in_a_row = record.failures >= options.failures
        is_often = record.good + record.bad >= options.min_calls and record.rate() >= options.rate
        if not is_in_a_row and not is_often:
            return False
        rate = 1.0 if is_in_a_row else record.rate()  # what it did well before it broke is past
        others = [self._faded(other, now) for other in range(len(self._records)) if other != index]
        bad, good = sum(other.bad for other in others), sum(other.good for other in others)
        return rate >= (bad / (bad + good) if bad + good else 0.0) + options.margin

    def _eject(self, record: _Record, now: float) -> None:
        options = self._options
        if record.until:
            record.level = max(0, record.level - int(max(0.0, now - record.until) / options.forgiven_s))
        seconds = min(options.first_s * 2.0 ** min(record.level, 60), options.max_s)
        record.is_ejected, record.is_on_trial, self.is_calm = True, False, False
        record.until = now + seconds * (1.0 - 0.2 * self._uniform())
        record.level += 1
        record.ejections += 1

    def _faded(self, index: int, now: float) -> _Record:
        record = self._records[index]
        passed_s = now - record.faded_at
        if passed_s > 0.1:  # often enough, and not a power for every call
            keep = 0.5 ** (passed_s / self._options.half_life_s)
            record.good, record.bad, record.faded_at = record.good * keep, record.bad * keep, now
        return record
