"""Percentiles by nearest rank, so that each is a latency that somebody waited for, and histograms of latencies."""

import numpy as np
from numpy.typing import NDArray

from loadtest.results import Percentiles

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
