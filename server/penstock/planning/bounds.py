"""Upper bounds on any policy's rate inside an SLO: closed forms, and an exact offline optimum."""

from collections.abc import Sequence

import numpy as np

from penstock.planning.profile import EngineProfile


def nexus_rate(profile: EngineProfile, slo_s: float, *, instances: int = 1) -> float:
    """Requests per second with 2 t(b) <= SLO: a request that just missed a batch is answered by the next one."""
    size = profile.largest_within(slo_s / 2)
    return instances * size / profile.seconds(size) if size else 0.0


def capacity(profile: EngineProfile, slo_s: float, *, instances: int = 1) -> float:
    """Requests per second with t(b) <= SLO, as if batches arrived complete. No policy exceeds it."""
    return instances * max((size / profile.seconds(size) for size in _sizes(profile, slo_s)), default=0.0)


def even_goodput(profile: EngineProfile, slo_s: float, rate: float, *, instances: int = 1) -> float:
    """Requests per second inside the SLO for evenly spaced arrivals (D/D) with drops: b <= rate * (SLO - t(b)) + 1."""
    fitting = (
        size / profile.seconds(size)
        for size in _sizes(profile, slo_s)
        if size <= rate * (slo_s - profile.seconds(size)) + 1
    )
    return min(rate, instances * max(fitting, default=0.0))


def even_rate(profile: EngineProfile, slo_s: float, *, instances: int = 1) -> float:
    """The highest rate of evenly spaced requests that are all answered inside the SLO."""
    low, high = 0.0, capacity(profile, slo_s, instances=instances)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if even_goodput(profile, slo_s, middle, instances=instances) >= middle:
            low = middle
        else:
            high = middle
    return low


def _sizes(profile: EngineProfile, slo_s: float) -> range:
    return range(1, profile.largest_within(slo_s) + 1)


BLOCKS = 16  # times the largest batch: states in one array


def fewest_lost(times: Sequence[float], profile: EngineProfile, slo_s: float, *, at_most: int) -> int | None:
    """Minimum number of requests that miss the SLO; None if it exceeds at_most.

    Exact dynamic programme over the earliest end for "the first i decided, d of them lost": with equal SLOs, an optimal
    schedule serves batches of neighbours in the order of arrival.
    """
    count, arrivals = len(times), np.asarray(times)
    largest = profile.largest_within(slo_s)
    service = np.array([profile.seconds(rows) for rows in range(1, largest + 1)])
    ends = np.full((BLOCKS * largest + 1, at_most + 1), np.inf)  # row i - base: for the first i
    ends[0, 0], base = 0.0, 0
    for i in range(count):
        if i - base == len(ends) - 1 - largest:
            ends[: largest + 1] = ends[i - base :]
            ends[largest + 1 :] = np.inf
            base = i
        at, deadline = i - base, arrivals[i] + slo_s
        row = ends[at]
        np.minimum(ends[at + 1, 1:], row[:-1], out=ends[at + 1, 1:])
        last = arrivals[i : i + largest]
        most = int(np.searchsorted(last + service[: len(last)], deadline, side="right"))
        lost = _worth_keeping(np.maximum(row, arrivals[i]), deadline)
        end = np.maximum(row[lost], last[:most, None]) + service[:most, None]
        end[end > deadline] = np.inf
        after = ends[at + 1 : at + 1 + most, lost]
        np.minimum(after, end, out=after)
    possible = np.flatnonzero(np.isfinite(ends[count - base]))
    return int(possible[0]) if len(possible) else None


def _worth_keeping(ends: "np.ndarray[tuple[int], np.dtype[np.float64]]", deadline: float) -> slice:
    """The loss counts that can still be optimal: they end before the deadline, and before all lower counts."""
    open_at = np.flatnonzero(ends < deadline)
    return slice(int(open_at[0]), int(np.argmin(ends)) + 1) if len(open_at) else slice(0)
