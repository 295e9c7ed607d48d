"""Counts of a run as it goes, for a table that is drawn every second: little to keep, quick to read."""

from collections import Counter, deque
from collections.abc import Iterable

import msgspec
import numpy as np

from loadtest.measure.percentiles import percentiles_of
from loadtest.results import Record, Status

LATENCIES_KEPT = 20_000


class Live(msgspec.Struct, frozen=True):
    """Totals so far, and rate and latencies (milliseconds) of what was answered in the last seconds."""

    sent: int
    ok: int
    refused: int
    failed: int
    timeouts: int
    not_sent: int
    ok_per_s: float
    p50_ms: float
    p99_ms: float


class LiveCounts:
    """Counts records as they come. Memory is bounded: totals, a count a second, and the newest latencies.

    At more than 20,000 answers in the window, percentiles are of the newest 20,000.
    """

    def __init__(self, *, window_s: int = 5) -> None:
        self._window_s = window_s
        self._totals: Counter[Status] = Counter()
        self._ok_in: Counter[int] = Counter()
        self._latest: deque[tuple[float, float]] = deque(maxlen=LATENCIES_KEPT)
        self._first_s: float | None = None

    def add(self, records: Iterable[Record]) -> None:
        """Counts what ended since the last time, in any order."""
        for record in records:
            self._totals[record.status] += 1
            self._first_s = record.intended_s if self._first_s is None else min(self._first_s, record.intended_s)
            if record.status is Status.OK:
                self._ok_in[int(record.done_s)] += 1
            if record.status in (Status.OK, Status.TIMEOUT):
                self._latest.append((record.done_s, (record.done_s - record.intended_s) * 1e3))

    def snapshot(self, now_s: float) -> Live:
        """How it stands at that moment of the run. The rate is over whole seconds: the one that runs is left out."""
        self._forget_before(int(now_s) - self._window_s)
        latest = percentiles_of(np.array([ms for done_s, ms in self._latest if done_s > now_s - self._window_s]))
        totals = self._totals
        return Live(
            sent=totals.total() - totals[Status.NOT_SENT],
            ok=totals[Status.OK],
            refused=totals[Status.REFUSED],
            failed=totals[Status.FAILED],
            timeouts=totals[Status.TIMEOUT],
            not_sent=totals[Status.NOT_SENT],
            ok_per_s=self._rate(int(now_s)),
            p50_ms=latest.p50,
            p99_ms=latest.p99,
        )

    def _rate(self, second: int) -> float:
        if self._first_s is None:
            return 0.0
        ok = sum(count for at, count in self._ok_in.items() if at < second)
        seconds = min(float(self._window_s), second - self._first_s)
        return ok / seconds if seconds >= 0.5 else 0.0

    def _forget_before(self, second: int) -> None:
        for old in [at for at in self._ok_in if at < second]:
            del self._ok_in[old]
