"""The speed of two sessions against each other, in turns: what disturbs the one disturbs the other."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 5
WARM_UP_RUNS = 3
ROUND_S = 1.0
FEWEST_RUNS = 5

Run = Callable[[], object]
Clock = Callable[[], float]  # seconds, monotonic


@dataclass(frozen=True, slots=True)
class Comparison:
    """Milliseconds of one run, the median of each round; round i of both is of the same seconds."""

    batch_size: int
    float_ms: tuple[float, ...]
    int8_ms: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times as fast INT8 was, by round."""
        return tuple(one / other for one, other in zip(self.float_ms, self.int8_ms, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.ratios)


def compare(
    batch_size: int, float_run: Run, int8_run: Run, *, rounds: int = ROUNDS, clock: Clock = time.perf_counter
) -> Comparison:
    """After a warm-up, rounds in which every run of the one has a run of the other as its neighbour."""
    for run in (float_run, int8_run):
        for _ in range(WARM_UP_RUNS):
            run()
    found = [_round((float_run, int8_run), clock) for _ in range(rounds)]
    return Comparison(batch_size, tuple(one for one, _ in found), tuple(other for _, other in found))


def _round(runs: tuple[Run, Run], clock: Clock) -> tuple[float, float]:
    """The median milliseconds of each, of as many runs as ROUND_S holds; who is first changes from pair to pair."""
    taken_s: tuple[list[float], list[float]] = ([], [])
    started = clock()
    while len(taken_s[0]) < FEWEST_RUNS or clock() - started < ROUND_S:
        turns = list(zip(runs, taken_s, strict=True))
        for run, into in turns if len(taken_s[0]) % 2 == 0 else reversed(turns):
            before = clock()
            run()
            into.append(clock() - before)
    return statistics.median(taken_s[0]) * 1000, statistics.median(taken_s[1]) * 1000


def median_round(run: Run, clock: Clock = time.perf_counter) -> float:
    """The median milliseconds of as many runs of one thing as ROUND_S holds, after a warm-up."""
    for _ in range(WARM_UP_RUNS):
        run()
    taken_s: list[float] = []
    started = clock()
    while len(taken_s) < FEWEST_RUNS or clock() - started < ROUND_S:
        before = clock()
        run()
        taken_s.append(clock() - before)
    return statistics.median(taken_s) * 1000
