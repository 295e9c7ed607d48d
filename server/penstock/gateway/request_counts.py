"""Inference counts by model, read from the metrics of one or all processes, and rates over the last minute."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from prometheus_client import Metric
from prometheus_client.mmap_dict import MmapedDict

from penstock.metric_table import SECONDS

_COUNTER, _BUCKET = "penstock_requests_total", "penstock_request_seconds_bucket"
_BOUNDS = (*SECONDS, float("inf"))
_KEY_STARTS = (f'["penstock_requests", "{_COUNTER}"', f'["penstock_request_seconds", "{_BUCKET}"')
Sample = tuple[str, Mapping[str, str], float]  # name, labels, value; buckets are not cumulative


@dataclass(slots=True)
class RequestCounts:
    """Inferences of one model since the start. codes: by final status. durations: by bucket of SECONDS; the last for
    longer ones.
    """

    codes: dict[str, int] = field(default_factory=dict)
    durations: list[int] = field(default_factory=lambda: [0] * len(_BOUNDS))


Counts = Mapping[str, RequestCounts]


def sum_samples(samples: Iterable[Sample]) -> dict[str, RequestCounts]:
    """Counts by model."""
    counts: dict[str, RequestCounts] = {}
    for name, labels, value in samples:
        of_model = counts.setdefault(labels["model"], RequestCounts())
        if name == _COUNTER:
            of_model.codes[labels["code"]] = of_model.codes.get(labels["code"], 0) + int(value)
        else:
            of_model.durations[bisect_left(_BOUNDS, float(labels["le"]))] += int(value)
    return counts


def samples_of(families: Iterable[Metric]) -> Iterator[Sample]:
    """Samples of requests_total and request_seconds of this process."""
    for family in families:
        below, series = 0.0, None
        for sample in family.samples:
            if sample.name == _COUNTER:
                yield sample.name, sample.labels, sample.value
            elif sample.name == _BUCKET:
                this = sample.labels["model"], sample.labels["protocol"]
                below = below if this == series else 0.0
                yield sample.name, sample.labels, sample.value - below
                below, series = sample.value, this


def samples_in(folder: Path) -> Iterator[Sample]:
    """The same samples for all processes, from their shared files. Blocks for milliseconds."""
    for kind in ("counter", "histogram"):
        for file in folder.glob(f"{kind}_*.db"):
            for key, value, *_ in MmapedDict.read_all_values_from_file(str(file)):  # type: ignore[no-untyped-call]
                if key.startswith(_KEY_STARTS):
                    _, name, labels, *_ = msgspec.json.decode(key)
                    yield name, labels, value


@dataclass(frozen=True, slots=True)
class RecentFigures:
    """Rate and latencies over the last over_s seconds. p50_s, p99_s: None without requests."""

    over_s: float = 0.0
    rate_per_s: float = 0.0
    p50_s: float | None = None
    p99_s: float | None = None


class RequestHistory:
    """Counts of the last minute. Sans-IO; times are monotonic seconds."""

    WINDOW_S, INTERVAL_S = 60.0, 10.0

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Counts]] = deque(maxlen=int(self.WINDOW_S / self.INTERVAL_S) + 1)

    def add(self, now: float, counts: Counts) -> None:
        """Stores the counts. Call it every INTERVAL_S."""
        self._samples.append((now, counts))

    def figures(self, model: str, now: float, current: Counts, over_s: float = WINDOW_S) -> RecentFigures:
        """Figures since the newest sample at least over_s old, else since the oldest. current: counts now."""
        if not self._samples:
            return RecentFigures()
        old = [sample for sample in self._samples if sample[0] <= now - over_s]
        then, counts = old[-1] if old else self._samples[0]
        elapsed_s = now - then
        if elapsed_s <= 0:
            return RecentFigures()
        before = counts.get(model, RequestCounts()).durations
        durations = [max(0, new - ago) for new, ago in zip(_durations(current, model), before, strict=True)]
        return RecentFigures(elapsed_s, sum(durations) / elapsed_s, quantile(durations, 0.5), quantile(durations, 0.99))


def _durations(counts: Counts, model: str) -> list[int]:
    return counts[model].durations if model in counts else RequestCounts().durations


def quantile(durations: list[int], share: float) -> float | None:
    """Seconds under which this share of the durations is, interpolated in its bucket; None without any.

    In the last bucket, which has no upper bound, its lower bound.
    """
    rank, below = share * sum(durations), 0
    if not rank:
        return None
    for number, count in enumerate(durations):
        if count and below + count >= rank:
            lower = _BOUNDS[number - 1] if number else 0.0
            upper = _BOUNDS[number] if number < len(SECONDS) else lower
            return lower + (upper - lower) * (rank - below) / count
        below += count
    return None
