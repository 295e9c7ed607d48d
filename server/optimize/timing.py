"""The speed of two sessions against each other, in turns: what disturbs one disturbs the other."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 5
WARM_UP_RUNS = 3
ROUND_S = 0.4
FEWEST_RUNS = 3

Run = Callable[[], object]
Clock = Callable[[], float]  # seconds, monotonic


@dataclass(frozen=True, slots=True)
class Comparison:
    """Milliseconds of one run, the median of each round; round i of both happened one after the other."""

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
    """After a warm-up, rounds of the one and the other; who begins changes from round to round."""
    for run in (float_run, int8_run):
        for _ in range(WARM_UP_RUNS):
            run()
    float_ms: list[float] = []
    int8_ms: list[float] = []
    for number in range(rounds):
        turns = [(float_run, float_ms), (int8_run, int8_ms)]
        for run, into in turns if number % 2 == 0 else reversed(turns):
            into.append(_median_ms(run, clock))
    return Comparison(batch_size, tuple(float_ms), tuple(int8_ms))


def _median_ms(run: Run, clock: Clock) -> float:
    """Of as many runs as ROUND_S holds, at least FEWEST_RUNS."""
    taken_s: list[float] = []
    while len(taken_s) < FEWEST_RUNS or sum(taken_s) < ROUND_S:
        started = clock()
        run()
        taken_s.append(clock() - started)
    return statistics.median(taken_s) * 1000
