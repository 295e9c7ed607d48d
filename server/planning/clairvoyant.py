"""The best that a scheduler could have done that knew every arrival beforehand: one instance, equal SLOs."""

from collections.abc import Sequence

import numpy as np

from server.planning.profile import Profile


def fewest_lost(times: Sequence[float], profile: Profile, slo_s: float, *, at_most: int) -> int | None:
    """How many of the requests must miss the SLO at least; None where that is more than at_most.

    Exact: with equal SLOs some best schedule serves in the order of arrival, in batches of neighbours. (A request that
    is left out between two of a batch can take the place of the batch's first one: it came later, so its deadline is
    later too.) So the earliest end for "the first i are decided, d of them lost" tells everything.
    """
    count, arrivals = len(times), np.asarray(times)
    largest = profile.largest_within(slo_s)
    service = np.array([profile.seconds(rows) for rows in range(1, largest + 1)])
    ends = np.full((count + 1, at_most + 1), np.inf)
    ends[0, 0] = 0.0
    for i in range(count):
        row, deadline = ends[i], arrivals[i] + slo_s
        np.minimum(ends[i + 1, 1:], row[:-1], out=ends[i + 1, 1:])
        last = arrivals[i : i + largest]
        most = int(np.searchsorted(last + service[: len(last)], deadline, side="right"))
        open_at = np.flatnonzero(row < deadline)
        if not most or not len(open_at):
            continue
        lost = slice(open_at[0], open_at[-1] + 1)
        end = np.maximum(row[lost], last[:most, None]) + service[:most, None]
        end[end > deadline] = np.inf
        after = ends[i + 1 : i + 1 + most, lost]
        np.minimum(after, end, out=after)
    possible = np.flatnonzero(np.isfinite(ends[count]))
    return int(possible[0]) if len(possible) else None
