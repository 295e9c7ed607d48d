"""When requests are sent: counts, moments and rates of every shape."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_load.pacer import offered_rate, schedule_seconds, send_times
from penstock_load.scenario import Arrivals, Shape, Unit

RATES = st.floats(0.1, 300)
SECONDS = st.floats(0.05, 12)


@st.composite
def steady_arrivals(draw: st.DrawFn) -> Arrivals:
    """Any shape whose moments follow from its rate."""
    rate, to_rate, every_s = draw(RATES), draw(RATES), draw(st.floats(0.2, 5))
    return draw(
        st.sampled_from(
            [
                Arrivals(shape=Shape.CONSTANT, rate=rate),
                Arrivals(shape=Shape.RAMP, rate=rate, to_rate=to_rate),
                Arrivals(shape=Shape.RAMP, rate=0, to_rate=to_rate),
                Arrivals(shape=Shape.RAMP, rate=rate, to_rate=0),
                Arrivals(shape=Shape.STEP, rates=(rate, to_rate, rate / 3)),
                Arrivals(shape=Shape.BURST, rate=rate, to_rate=to_rate, every_s=every_s, burst_s=every_s / 3),
                Arrivals(shape=Shape.BURST, rate=0, to_rate=to_rate, every_s=every_s, burst_s=every_s),
            ]
        )
    )


def moments(arrivals: Arrivals, seconds: float, seed: int = 0) -> list[float]:
    """All of them."""
    return list(send_times(arrivals, seconds, seed=seed))


def integral(arrivals: Arrivals, seconds: float, until_s: float) -> float:
    """How many requests the rate asks until then, by school formulas."""
    match arrivals.shape:
        case Shape.RAMP:
            return arrivals.rate * until_s + (arrivals.to_rate - arrivals.rate) * until_s**2 / (2 * seconds)
        case Shape.STEP:
            step_s = seconds / len(arrivals.rates)
            inside = (min(max(until_s - i * step_s, 0), step_s) for i in range(len(arrivals.rates)))
            return sum(rate * length_s for rate, length_s in zip(arrivals.rates, inside, strict=True))
        case Shape.BURST:
            whole, rest_s = divmod(until_s, arrivals.every_s)
            burst_s = whole * arrivals.burst_s + min(rest_s, arrivals.burst_s)
            return burst_s * arrivals.to_rate + (until_s - burst_s) * arrivals.rate
        case _:
            return arrivals.rate * until_s


@given(steady_arrivals(), SECONDS)
def test_send_times_of_any_shape_are_where_the_integral_of_the_rate_is_whole(
    arrivals: Arrivals, seconds: float
) -> None:
    """Request i goes when the rate's integral reaches i, so at every moment the count is the integral within one."""
    times = moments(arrivals, seconds)
    assert times == sorted(times)
    assert all(0 <= at_s < seconds for at_s in times)
    reached = [integral(arrivals, seconds, at_s) for at_s in times]
    assert reached == pytest.approx(list(range(len(times))), abs=1e-6)
    assert len(times) == pytest.approx(integral(arrivals, seconds, seconds), abs=1 + 1e-6)


def test_constant_arrivals_are_evenly_spaced_from_zero() -> None:
    """Request i of a constant rate is sent at i divided by the rate, without drift."""
    times = moments(Arrivals(shape=Shape.CONSTANT, rate=3), 1000)
    assert times == [i / 3 for i in range(3000)]


def test_ramp_sends_where_the_integral_of_its_rate_is_whole() -> None:
    """A ramp from 0 to 20/s over 10 s has sent t² requests at t."""
    times = moments(Arrivals(shape=Shape.RAMP, rate=0, to_rate=20), 10)
    assert times == pytest.approx([math.sqrt(i) for i in range(100)])


def test_bursts_begin_with_the_phase_and_last_as_said() -> None:
    """2/s, with 10/s in the first second of every four."""
    arrivals = Arrivals(shape=Shape.BURST, rate=2, to_rate=10, every_s=4, burst_s=1)
    per_second = [0] * 8
    for at_s in moments(arrivals, 8):
        per_second[int(at_s)] += 1
    assert per_second == [10, 2, 2, 2, 10, 2, 2, 2]
    assert [offered_rate(arrivals, at_s, seconds=8) for at_s in (0, 0.99, 1, 3.9, 4, 8)] == [10, 10, 2, 2, 10, 0]


def test_steps_are_equally_long() -> None:
    """Three rates share nine seconds, three each."""
    times = moments(Arrivals(shape=Shape.STEP, rates=(1, 5, 2)), 9)
    assert [sum(low <= at_s < low + 3 for at_s in times) for low in (0, 3, 6)] == [3, 15, 6]


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential() -> None:
    """At 1000/s for 100 s: a mean gap of 1 ms that deviates as much, and counts whose variance is their mean."""
    times = moments(Arrivals(shape=Shape.POISSON, rate=1000), 100, seed=7)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.001, rel=0.02)
    assert statistics.stdev(gaps) == pytest.approx(0.001, rel=0.02)
    per_tenth = [0] * 1000
    for at_s in times:
        per_tenth[int(at_s * 10)] += 1
    assert statistics.variance(per_tenth) / statistics.fmean(per_tenth) == pytest.approx(1, abs=0.2)


@given(st.integers(0, 1 << 62), RATES)
def test_poisson_arrivals_are_those_of_the_seed(seed: int, rate: float) -> None:
    """The same seed gives the same moments, another seed others; all lie within the phase."""
    arrivals = Arrivals(shape=Shape.POISSON, rate=rate + 20)
    first = moments(arrivals, 3, seed)
    assert first == moments(arrivals, 3, seed) != moments(arrivals, 3, seed + 1)
    assert all(0 < at_s < 3 for at_s in first)


@given(steady_arrivals(), st.integers(1, 9))
def test_split_over_processes_loses_and_doubles_nothing(arrivals: Arrivals, count: int) -> None:
    """Every n-th moment for each of n processes: together they are the schedule."""
    parts = [itertools.islice(send_times(arrivals, 5, seed=1), part, None, count) for part in range(count)]
    assert sorted(itertools.chain(*parts)) == moments(arrivals, 5, seed=1)


def test_replay_sends_when_the_recording_says_at_the_asked_speed() -> None:
    """Twice as fast is half the moments; a shorter phase cuts it, and seconds 0 plays it to its end."""
    arrivals, recording = Arrivals(shape=Shape.REPLAY, file="a.jsonl", speed=2), [0, 1, 1, 4, 6]
    assert list(send_times(arrivals, 3, seed=0, recording=recording)) == [0, 0.5, 0.5, 2]
    assert list(send_times(arrivals, 0, seed=0, recording=recording)) == [0, 0.5, 0.5, 2, 3]
    assert schedule_seconds(arrivals, 0, recording=recording) == 3.75
    assert offered_rate(arrivals, 0.5, seconds=0, recording=recording) == 3
    assert offered_rate(arrivals, 9, seconds=0, recording=recording) == 0
    assert schedule_seconds(arrivals, 0, recording=[0]) == 0.5


def test_rates_of_capacity_are_shares_of_it() -> None:
    """Half of a capacity of 80/s is 40/s, in a step as in a constant rate."""
    half = Arrivals(shape=Shape.CONSTANT, unit=Unit.OF_CAPACITY, rate=0.5)
    steps = Arrivals(shape=Shape.STEP, unit=Unit.OF_CAPACITY, rates=(0.25, 1.25))
    assert len(list(send_times(half, 2, seed=0, capacity_per_s=80))) == 80
    assert offered_rate(steps, 1.5, seconds=2, capacity_per_s=80) == 100


@pytest.mark.parametrize(
    ("arrivals", "seconds", "words"),
    [
        (Arrivals(shape=Shape.CONSTANT, unit=Unit.OF_CAPACITY, rate=1), 1, "needs a capacity, and it is None"),
        (Arrivals(shape=Shape.CONSTANT), 1, "rates of shape constant: 0"),
        (Arrivals(shape=Shape.POISSON, rate=math.inf), 1, "rates of shape poisson: inf"),
        (Arrivals(shape=Shape.RAMP, rate=-1, to_rate=5), 1, "-1, 5"),
        (Arrivals(shape=Shape.STEP), 1, "rates of shape step: none"),
        (Arrivals(shape=Shape.BURST, rate=1, to_rate=2, every_s=1, burst_s=2), 1, "burst_s = 2 and every_s = 1"),
        (Arrivals(shape=Shape.CONSTANT, rate=1), 0, "a schedule of 0 s"),
        (Arrivals(shape=Shape.REPLAY, file="a.jsonl"), 1, "a.jsonl holds no request"),
    ],
)
def test_arrivals_that_cannot_be_had_are_refused_at_once(arrivals: Arrivals, seconds: float, words: str) -> None:
    """The sentence names the value, before anything is sent."""
    with pytest.raises(ValueError, match=words):
        send_times(arrivals, seconds, seed=0)


def test_unsorted_recording_is_refused() -> None:
    """A recording runs from 0 upwards."""
    with pytest.raises(ValueError, match="not sorted from 0 upwards"):
        send_times(Arrivals(shape=Shape.REPLAY), 1, seed=0, recording=[1, 0])
