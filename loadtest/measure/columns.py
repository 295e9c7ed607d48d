"""Records as columns, so that every sum over hundreds of thousands of them is numpy's."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loadtest.measure.percentiles import Floats
from loadtest.results import Status

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
