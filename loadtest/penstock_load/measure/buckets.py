"""Latencies as a histogram tells them: how many kept a bound, and between which bounds a percentile lies."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_LATENCY = "penstock_video_glass_to_event_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Buckets:
    """upto: (bound in seconds, how many took no longer), rising, the last bound infinite."""

    upto: tuple[tuple[float, int], ...]

    @property
    def count(self) -> int:
        """Of all."""
        return self.upto[-1][1] if self.upto else 0

    def since(self, before: "Buckets") -> "Buckets":
        """What came after an earlier look at the same histogram."""
        earlier = dict(before.upto)
        return Buckets(tuple((bound, count - earlier.get(bound, 0)) for bound, count in self.upto))

    def within(self, bound_s: float) -> int:
        """How many kept the bound, for sure: of the widest bucket that is no wider."""
        return max((count for bound, count in self.upto if bound <= bound_s), default=0)

    def percentile_ms(self, share: float) -> float:
        """Of so much of all, spread evenly in its bucket, as Prometheus has it; NaN where there is nothing.

        In the last bucket: its lower bound.
        """
        rank = share * self.count
        if not rank:
            return math.nan
        low_s, below = 0.0, 0
        for bound_s, count in self.upto:
            if count >= rank:
                within = (rank - below) / max(count - below, 1)
                return 1000 * (low_s if math.isinf(bound_s) else low_s + (bound_s - low_s) * within)
            low_s, below = bound_s, count
        return 1000 * low_s


def jain_index(shares: "tuple[int, ...]") -> float:
    """Jain's index of fairness: 1 where all got the same, 1/n where one got all."""
    squares = len(shares) * sum(share * share for share in shares)
    return sum(shares) ** 2 / squares if squares else 0.0


def latency_in(page: str, sources: Collection[str] = ()) -> Buckets:
    """Of the video program's metrics page: decoding to sinks, of these sources together; empty for all."""
    lines = "\n".join([*(line for line in page.splitlines() if line.startswith(_LATENCY)), ""])
    counts: dict[float, int] = {}
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            if not sources or sample.labels["source"] in sources:
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0) + int(sample.value)
    return Buckets(tuple(sorted(counts.items())))
