"""Learning call times, and the limit of the batch size."""

import random

import pytest

from penstock.gateway.batching.schedule import PROBE_PERIOD, Overlap
from penstock.gateway.batching.service_times import ServiceTimes
from penstock.protocol.inference import EngineTimeFit


def line_s(rows: int) -> float:
    """The engine of these tests."""
    return 0.002 + 0.00015 * rows


def learned(calls: int = 64, *, noise: float = 0.0) -> ServiceTimes:
    """Calls of 1 to 32 rows, in no order."""
    times, chance = ServiceTimes(), random.Random(7)
    for _ in range(calls):
        rows = chance.randint(1, 32)
        times.learn(rows, line_s(rows) * chance.lognormvariate(0.0, noise))
    return times


def fit_of(times: ServiceTimes) -> EngineTimeFit:
    """The fit, which there must be."""
    assert times.fit is not None
    return times.fit


@pytest.mark.parametrize(("sizes", "has_fit"), [([4] * 40, False), ([1, 2, 4, 8, 16, 8, 4], False), ([1, 2] * 4, True)])
def test_fit_needs_eight_calls_of_two_sizes(sizes: list[int], has_fit: bool) -> None:
    """Before that nothing is said; one size says nothing of another."""
    times = ServiceTimes()
    for rows in sizes:
        times.learn(rows, line_s(rows))

    assert (times.fit is not None) is has_fit


def test_fit_finds_the_line_through_noise() -> None:
    """Five percent of noise leaves less than five percent in what is expected, and a guard of about two deviations."""
    fit = fit_of(learned(400, noise=0.05))

    for rows in (1, 8, 32):
        assert fit.seconds(rows) == pytest.approx(line_s(rows), rel=0.05)
    assert 0.03 < fit.guard_s / line_s(16) < 0.2


def test_fit_ignores_one_strange_call() -> None:
    """A call that takes a hundred times as long, and even two, move nothing, the guard included."""
    times = learned()
    before = fit_of(times)
    times.learn(5, line_s(5) * 100)
    times.learn(9, line_s(9) * 100)

    after = fit_of(times)

    assert after.seconds(16) == pytest.approx(before.seconds(16), rel=1e-6)
    assert after.guard_s < 0.001


@pytest.mark.parametrize(("factor", "calls"), [(10.0, 3), (0.1, 2)])
def test_fit_believes_a_changed_engine(factor: float, calls: int) -> None:
    """An engine that is ten times as slow from now on is known after three calls, one as quick after two."""
    times = learned()
    for rows in (4, 20, 9)[:calls]:
        times.learn(rows, line_s(rows) * factor)

    fit = fit_of(times)

    for rows in (1, 16, 32):
        assert fit.seconds(rows) == pytest.approx(line_s(rows) * factor, rel=0.1)


def test_fit_never_falls_nor_starts_below_nothing() -> None:
    """Whatever is seen, larger batches do not take less, and none takes less than nothing."""
    for power in (-1, 2):
        times = ServiceTimes()
        for rows in range(1, 40):
            times.learn(rows, 0.001 * float(rows) ** power)
        fit = fit_of(times)
        assert fit.beta_s >= 0.0
        assert fit.alpha_s >= 0.0


def test_overlap_finds_what_the_way_takes() -> None:
    """A call sent early saves the way to the engine and back, and nothing more."""
    overlap, way_s = Overlap(), 0.0004
    for number in range(200):
        lead_s = overlap.lead_s(0.002, number)
        overlap.learn(0.003 + way_s, 0.003 + way_s - min(way_s, lead_s), lead_s)

    assert overlap.overhead_s == pytest.approx(way_s, rel=0.1)
    assert overlap.whole_s(0.003, 0.001) == pytest.approx(0.003 + way_s, rel=0.02)


def test_overlap_without_a_way_holds_the_batch() -> None:
    """Where nothing can be saved nothing is sent early, but for one batch in sixteen that would find it out."""
    overlap = Overlap()
    early = 0
    for number in range(20 * PROBE_PERIOD):
        lead_s = overlap.lead_s(0.002, number)
        early += lead_s > 0.0
        overlap.learn(0.003, 0.003, lead_s)

    assert early == 20
