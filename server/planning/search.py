"""The highest rate at which something still holds, and how sure that is."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.planning.arrivals import Arrivals, Pattern

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # two-sided, for 1, 2, … degrees of freedom


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to look. count, span_s: arrivals of a probe and their seconds, at least. resolution: share of a rate."""

    count: int = 20_000
    span_s: float = 0.0
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    resolution: float = 0.005

    def arrivals(self, pattern: Pattern, rate: float, seed: int) -> Arrivals:
        """So many of that rate."""
        return pattern(rate, max(self.count, int(rate * self.span_s)), seed)


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second, the mean over seeds; plus_minus: half of its 95 % confidence interval, by Student's t."""

    per_s: float
    plus_minus: float
    by_seed: tuple[float, ...]


def highest(holds: Callable[[float], bool], *, top: float, resolution: float, floor: float = 0.0) -> float:
    """The highest rate up to top at which it holds, by bisection; 0 where it does not hold above the floor.

    floor: looked at first, if it is above 0, so that a search that cannot beat it costs one look.
    """
    if floor > 0.0 and not holds(floor):
        return 0.0
    low, high = floor, top
    while high - low > resolution * high and high > top * resolution:
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def over_seeds(rates: Sequence[float]) -> Rate:
    """The mean of what the seeds gave, and how far it can be trusted; infinitely little for one seed."""
    degrees = len(rates) - 1
    if not degrees:
        return Rate(rates[0], float("inf"), tuple(rates))
    spread = statistics.stdev(rates) / len(rates) ** 0.5
    factor = STUDENT_95[min(degrees, len(STUDENT_95)) - 1]
    return Rate(statistics.fmean(rates), factor * spread, tuple(rates))
