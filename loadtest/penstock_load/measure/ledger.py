"""Records as arrays, and nearest-rank percentiles over them."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock_load.results import Percentiles, Record, Stages, Status

Floats = NDArray[np.float64]

NOTHING = Percentiles(count=0, mean=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0, p999=0.0, highest=0.0)
BINS_A_DECADE = 20
LOWEST_MS, DECADES = 0.01, 8  # 0.01 ms to 1,000 s
BOUNDS_MS: Floats = np.array(
    [float(f"{LOWEST_MS * 10 ** (step / BINS_A_DECADE):.4g}") for step in range(DECADES * BINS_A_DECADE + 1)]
)


def at_rank(ascending: Floats, per_mille: int) -> float:
    """The value that so many in a thousand do not exceed: the nearest rank. The values ascend and are not none."""
    rank = -(-ascending.size * per_mille // 1000)
    return float(ascending[max(rank, 1) - 1])


def percentiles_of(latencies_ms: Floats) -> Percentiles:
    """The percentiles of latencies in any order; all 0 where there are none."""
    if not latencies_ms.size:
        return NOTHING
    ascending = np.sort(latencies_ms)
    return Percentiles(
        count=int(ascending.size),
        mean=float(ascending.mean()),
        p50=at_rank(ascending, 500),
        p90=at_rank(ascending, 900),
        p95=at_rank(ascending, 950),
        p99=at_rank(ascending, 990),
        p999=at_rank(ascending, 999),
        highest=float(ascending[-1]),
    )


def histogram_of(latencies_ms: Floats) -> tuple[tuple[float, int], ...]:
    """(upper bound in ms, count) of every bin that is not empty: 20 bins a decade, ascending.

    A bin holds what is above the bound before it, up to and with its own; the first and last take what lies outside.
    """
    places = np.minimum(np.searchsorted(BOUNDS_MS, latencies_ms, side="left"), BOUNDS_MS.size - 1)
    counts = np.bincount(places, minlength=BOUNDS_MS.size)
    return tuple((float(BOUNDS_MS[place]), int(counts[place])) for place in np.flatnonzero(counts))


STATUS_CODES = {status: code for code, status in enumerate(Status)}
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Records in their order. Times in seconds since the run's start; latency and service in milliseconds.

    latency: from the intended moment; service: from the moment it was sent. status: a code of STATUS_CODES.
    """

    intended_s: Floats
    sent_s: Floats
    done_s: Floats
    status: NDArray[np.int8]
    latency_ms: Floats
    service_ms: Floats

    @classmethod
    def of(cls, *, intended_s: Floats, sent_s: Floats, done_s: Floats, status: NDArray[np.int8]) -> Self:
        """Those, and the latencies that follow."""
        return cls(intended_s, sent_s, done_s, status, (done_s - intended_s) * 1e3, (done_s - sent_s) * 1e3)

    def has(self, *statuses: Status) -> Bools:
        """Which records ended in one of these ways."""
        return np.isin(self.status, [STATUS_CODES[status] for status in statuses])

    def only(self, which: Bools | NDArray[np.intp]) -> "Columns":
        """The records that a mask or a list of places names."""
        return Columns(
            intended_s=self.intended_s[which],
            sent_s=self.sent_s[which],
            done_s=self.done_s[which],
            status=self.status[which],
            latency_ms=self.latency_ms[which],
            service_ms=self.service_ms[which],
        )


MAX_TEXTS = 1000
OTHER_TEXTS = "other texts"
_STAGES = Stages.__struct_fields__


@dataclass(slots=True)
class Account:
    """What is counted of requests besides their times.

    stages_ms: sums over the answers that say anything of theirs, and how many those are. errors: by text; those beyond
    the first thousand texts count together.
    """

    stages_ms: list[float] = field(default_factory=lambda: [0.0] * len(_STAGES))
    with_stages: int = 0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        """Counts it."""
        if record.status is Status.OK:
            self._add_answer(record)
        if record.error:
            is_room = record.error in self.errors or len(self.errors) < MAX_TEXTS
            self.errors[record.error if is_room else OTHER_TEXTS] += 1

    def _add_answer(self, record: Record) -> None:
        if record.batch_size:
            self.batch_sizes[record.batch_size] += 1
        stages_ms = (
            record.decode_ms,
            record.preprocess_ms,
            record.queue_ms,
            record.infer_ms,
            record.postprocess_ms,
            record.total_ms,
        )
        if any(stages_ms):
            self.with_stages += 1
            for place, stage_ms in enumerate(stages_ms):
                self.stages_ms[place] += stage_ms

    def merged(self, other: Self) -> "Account":
        """Both together."""
        sums = [mine + theirs for mine, theirs in zip(self.stages_ms, other.stages_ms, strict=True)]
        count = self.with_stages + other.with_stages
        return Account(sums, count, self.batch_sizes + other.batch_sizes, self.errors + other.errors)

    @property
    def mean_stages(self) -> Stages | None:
        """None if no answer reported its stages."""
        return Stages(*(stage_ms / self.with_stages for stage_ms in self.stages_ms)) if self.with_stages else None


class Ledger:
    """Of one phase, one round and one side."""

    def __init__(self) -> None:
        self._intended_s, self._sent_s, self._done_s = array("d"), array("d"), array("d")
        self._status, self._label = array("b"), array("H")
        self._labels: dict[str, int] = {}
        self._accounts: list[Account] = []

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self:
        """A ledger that holds them."""
        ledger = cls()
        ledger.add(records)
        return ledger

    def add(self, records: Iterable[Record]) -> None:
        """Takes down what ended."""
        for record in records:
            label = self._labels.get(record.request)
            if label is None:
                label = self._labels[record.request] = len(self._labels)
                self._accounts.append(Account())
            self._intended_s.append(record.intended_s)
            self._sent_s.append(record.sent_s)
            self._done_s.append(record.done_s)
            self._status.append(STATUS_CODES[record.status])
            self._label.append(label)
            self._accounts[label].add(record)

    @property
    def labels(self) -> tuple[str, ...]:
        """Whose requests are in it, by name."""
        return tuple(sorted(self._labels))

    @property
    def everything(self) -> Account:
        """All labels' together."""
        total = Account()
        for account in self._accounts:
            total = total.merged(account)
        return total

    def account(self, label: str) -> Account:
        """One label's."""
        return self._accounts[self._labels[label]]

    def places(self, label: str) -> NDArray[np.intp]:
        """Where that label's requests are in the columns."""
        return np.flatnonzero(np.asarray(self._label) == self._labels[label])

    def columns(self) -> Columns:
        """The times of all requests, in the order in which they ended. Nothing is added afterwards."""
        return Columns.of(
            intended_s=np.asarray(self._intended_s),
            sent_s=np.asarray(self._sent_s),
            done_s=np.asarray(self._done_s),
            status=np.asarray(self._status),
        )
