"""A server's counters at one moment, and what happened between two of them. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Labels = frozenset[tuple[str, str]]
Series = Mapping[Labels, float]
Buckets = tuple[tuple[float, int], ...]


class CounterReset(Exception):
    """A counter fell or vanished between two readings: the server was started again, so their difference says nothing.

    One sentence.
    """


@dataclass(frozen=True, slots=True)
class Page:
    """Samples by name and labels, as a metrics page or a Prometheus server gives them."""

    samples: Mapping[str, Series] = field(default_factory=dict)

    def has(self, prefix: str) -> bool:
        """Whether any sample's name begins so."""
        return any(name.startswith(prefix) for name in self.samples)

    def select(self, name: str, labels: Mapping[str, str]) -> dict[Labels, float]:
        """The series of that name that carry these labels, whatever else they carry."""
        wanted = labels.items()
        return {found: value for found, value in self.samples.get(name, {}).items() if wanted <= dict(found).items()}


@dataclass(frozen=True, slots=True)
class Histogram:
    """What a histogram counted. buckets: (upper bound in s, observations up to it), ascending, the last one inf."""

    buckets: Buckets = ()
    count: int = 0
    sum: float = 0.0

    @property
    def mean(self) -> float:
        """0 where nothing was counted."""
        return self.sum / self.count if self.count else 0.0


def counter_delta(before: Page, after: Page, name: str, labels: Mapping[str, str]) -> float | None:
    """By how much the matching series grew together; None where the later page has none. Raises CounterReset.

    A series that the earlier page did not have yet began at 0.
    """
    grown = _grown(before, after, name, labels)
    return sum(grown.values()) if grown else None


def histogram_delta(before: Page, after: Page, name: str, labels: Mapping[str, str]) -> Histogram | None:
    """What the matching histograms counted in between; None where the later page has none. Raises CounterReset.

    name: without _bucket, _count and _sum.
    """
    buckets: dict[float, float] = {}
    for found, grown in _grown(before, after, f"{name}_bucket", labels).items():
        bound = float(dict(found)["le"])
        buckets[bound] = buckets.get(bound, 0.0) + grown
    count = counter_delta(before, after, f"{name}_count", labels)
    if count is None:
        return None
    return Histogram(
        tuple((bound, round(number)) for bound, number in sorted(buckets.items())),
        round(count),
        counter_delta(before, after, f"{name}_sum", labels) or 0.0,
    )


def add_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """All of them as one; their buckets' bounds are taken to be the same."""
    buckets: dict[float, int] = {}
    count, total = 0, 0.0
    for histogram in histograms:
        count, total = count + histogram.count, total + histogram.sum
        for bound, number in histogram.buckets:
            buckets[bound] = buckets.get(bound, 0) + number
    return Histogram(tuple(sorted(buckets.items())), count, total)


def quantile_bounds(buckets: Buckets, q: float) -> tuple[float, float]:
    """(low, high) in s of the bucket that holds the nearest-rank quantile; (0, inf) where nothing was counted.

    No interpolation: a histogram knows no more than this. high is inf above the last bound.
    """
    count = buckets[-1][1] if buckets else 0
    rank = min(max(1, math.ceil(q * count - 1e-9)), count)
    low = 0.0
    for bound, number in buckets:
        if count and number >= rank:
            return low, bound
        low = bound
    return 0.0, math.inf


def _grown(before: Page, after: Page, name: str, labels: Mapping[str, str]) -> dict[Labels, float]:
    earlier, later = before.select(name, labels), after.select(name, labels)
    for found, value in earlier.items():
        if later.get(found, -1.0) < value:
            raise CounterReset(f"{name}{_written(found)} fell from {value:g}: the server was started again meanwhile")
    return {found: value - earlier.get(found, 0.0) for found, value in later.items()}


def _written(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels)) + "}"
