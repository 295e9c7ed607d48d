"""The best that a scheduler could have done that knew every arrival beforehand: one instance, equal SLOs."""

from collections.abc import Sequence

import numpy as np

from server.planning.profile import Profile

BLOCKS = 16  # times the largest batch: states kept in one piece of memory


def fewest_lost(times: Sequence[float], profile: Profile, slo_s: float, *, at_most: int) -> int | None:
    """How many of the requests must miss the SLO at least; None where that is more than at_most.

    Exact: with equal SLOs some best schedule serves in the order of arrival, in batches of neighbours. (A request that
    is left out between two of a batch can take the place of the batch's first one: it came later, so its deadline is
    later too.) So the earliest end for "the first i are decided, d of them lost" tells everything, and a state that
    lost more without ending earlier than another can be forgotten.
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
    """From the first number of lost ones that leaves time, to the last that ends before all smaller ones."""
    open_at = np.flatnonzero(ends < deadline)
    return slice(int(open_at[0]), int(np.argmin(ends)) + 1) if len(open_at) else slice(0)
