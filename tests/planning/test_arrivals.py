"""When requests come: the same for the same seed, at the rate that was asked for, as irregular as they claim."""

import statistics
from itertools import pairwise

import pytest

from server.planning.arrivals import FRAMES_PER_S, JITTER_S, PATTERNS, bursty, periodic, poisson

COUNT, RATE = 20_000, 1500.0


def spread(times: tuple[float, ...], window_s: float = 0.02) -> float:
    """Variance over mean of the number of arrivals in a window: 1 for Poisson."""
    counts = [0] * (int(times[-1] / window_s) + 1)
    for at in times:
        counts[int(at / window_s)] += 1
    return statistics.variance(counts[:-1]) / statistics.fmean(counts[:-1])


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_keeps_its_rate_and_its_seed(name: str) -> None:
    """As many as asked, in order, from 0 on, at about the rate; the same again for the seed, others for another."""
    arrivals = PATTERNS[name](RATE, COUNT, 7)
    times = arrivals.times
    assert len(arrivals) == COUNT
    assert times[0] >= 0.0
    assert all(before <= after for before, after in pairwise(times))
    assert COUNT / times[-1] == pytest.approx(RATE, rel=0.15)
    assert PATTERNS[name](RATE, COUNT, 7) == arrivals
    assert PATTERNS[name](RATE, COUNT, 8) != arrivals
    assert len(arrivals.clients) in (0, COUNT)


def test_bursts_are_burstier_than_poisson_and_cameras_are_calmer() -> None:
    """By the variance of the number of arrivals in 20 ms over its mean, which is 1 for Poisson."""
    calm, even, wild = (spread(PATTERNS[name](RATE, COUNT, 3).times) for name in ("periodic", "poisson", "bursty"))
    assert calm < 0.8 < even < 1.2 < 3.0 < wild
    assert spread(PATTERNS["on-off"](RATE, COUNT, 3).times) > 2.0


def test_a_camera_sends_30_frames_a_second_with_jitter() -> None:
    """rate / 30 cameras; the gaps of one are 33 ms in the mean and vary by its jitter."""
    arrivals = periodic(1500.0, 5000, 1)
    assert len(set(arrivals.clients)) == 50
    own = [at for at, client in zip(arrivals.times, arrivals.clients, strict=True) if client == "camera 0"]
    gaps = [after - before for before, after in pairwise(own)]
    assert statistics.fmean(gaps) == pytest.approx(1 / FRAMES_PER_S, rel=0.01)
    assert statistics.stdev(gaps) == pytest.approx(2**0.5 * JITTER_S, rel=0.4)


def test_one_seed_at_two_rates_is_the_same_pattern_at_two_speeds() -> None:
    """A search for a rate meets the same bunches, so that it is not led by luck."""
    slow, quick = poisson(100.0, 50, 1).times, poisson(200.0, 50, 1).times
    assert [at / 2 for at in slow] == pytest.approx(list(quick))
    assert bursty(100.0, 50, 1).times != bursty(100.0, 50, 2).times
