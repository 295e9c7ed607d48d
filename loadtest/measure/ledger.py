"""The records of a phase, kept while it runs: times as columns, the rest as counts. Some 30 bytes a request, where a
record is 600, so that ten hours of soak fit."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loadtest.measure.columns import STATUS_CODES, Columns
from loadtest.results import Record, Stages, Status

TEXTS_KEPT = 1000
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
            is_room = record.error in self.errors or len(self.errors) < TEXTS_KEPT
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
        """None where no answer said anything."""
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
