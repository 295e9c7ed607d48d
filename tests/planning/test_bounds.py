"""Upper bounds on the rate that any policy can answer inside an SLO."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planning.bounds import capacity, even_goodput, even_rate, fewest_lost, nexus_rate
from penstock.planning.profile import V100, EngineProfile, linear_profile


@pytest.mark.parametrize(("slo_ms", "rate"), [(7, 2894), (15, 4975), (50, 6242)])
def test_nexus_bound_of_the_v100_is_the_published_one(slo_ms: float, rate: int) -> None:
    """2 t(b) <= SLO: 2,894, 4,975 and 6,242 requests a second; twice as many with two instances."""
    assert round(nexus_rate(V100, slo_ms / 1e3)) == rate
    assert nexus_rate(V100, slo_ms / 1e3, instances=2) == pytest.approx(2 * rate, abs=2)


def test_bounds_are_zero_where_one_row_takes_longer() -> None:
    """An SLO below one call cannot be met, below two calls not promised."""
    assert capacity(V100, 0.002) == even_rate(V100, 0.002) == 0.0
    assert nexus_rate(V100, 0.004) == 0.0 < capacity(V100, 0.004)


@pytest.mark.parametrize("slo_s", [0.007, 0.015, 0.05])
def test_evenly_spaced_requests_at_the_even_rate_can_all_be_answered(slo_s: float) -> None:
    """The bound for even arrivals is reached by some schedule, and 8 % above it by none."""
    rate = even_rate(V100, slo_s)
    assert fewest_lost([i / (rate * 0.995) for i in range(2000)], V100, slo_s, at_most=20) is not None
    assert fewest_lost([i / (rate * 1.08) for i in range(6000)], V100, slo_s, at_most=60) is None


def test_goodput_under_overload_grows_with_the_rate_towards_capacity() -> None:
    """More requests to choose from make fuller batches; never more than offered, never more than capacity."""
    plain = linear_profile("plain", alpha_s=0.002, beta_s=0.0001, max_batch_size=64)
    rates = (100.0, 1000.0, 3000.0, 6000.0, 12000.0)
    found = [even_goodput(plain, 0.006, rate) for rate in rates]
    assert found[:2] == [100.0, 1000.0]
    assert found == sorted(found)
    assert found[-1] <= capacity(plain, 0.006)


SLO_S = 7.0


def fewest_by_trying(times: tuple[float, ...], profile: EngineProfile) -> int:
    """Any subset of those that are here may go in any call; the engine may also idle until the next arrival."""
    everyone = frozenset(range(len(times)))

    @cache
    def most_served(left: frozenset[int], now: float) -> int:
        here = [i for i in left if times[i] <= now]
        later = [times[i] for i in left if times[i] > now]
        best = most_served(left, min(later)) if later else 0
        for mask in range(1, 1 << len(here)):
            chosen = [one for bit, one in enumerate(here) if mask >> bit & 1]
            if len(chosen) > profile.max_batch_size:
                continue
            end = now + profile.seconds(len(chosen))
            served = sum(end <= times[i] + SLO_S for i in chosen)
            best = max(best, served + most_served(left - frozenset(chosen), end))
        return best

    return len(times) - most_served(everyone, 0.0)


@given(
    gaps=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 5.0]), min_size=1, max_size=6),
    alpha=st.sampled_from([1.0, 2.0, 3.0]),
    beta=st.sampled_from([0.25, 1.0, 2.0]),
    most=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_no_schedule_of_a_few_requests_loses_fewer(gaps: list[float], alpha: float, beta: float, most: int) -> None:
    """For up to six requests, every way to serve them was tried: none is better, and one is as good."""
    times = tuple(sum(gaps[: i + 1]) for i in range(len(gaps)))
    profile = linear_profile("plain", alpha_s=alpha, beta_s=beta, max_batch_size=most)
    assert fewest_lost(times, profile, SLO_S, at_most=len(times)) == fewest_by_trying(times, profile)


def test_more_than_allowed_is_none() -> None:
    """Three at one moment before an engine that answers one a deadline: two are lost, and one was allowed."""
    profile = linear_profile("slow", alpha_s=4.0, beta_s=0.0, max_batch_size=1)
    assert fewest_lost((0.0, 0.0, 0.0), profile, SLO_S, at_most=2) == 2
    assert fewest_lost((0.0, 0.0, 0.0), profile, SLO_S, at_most=1) is None


def test_a_long_run_is_followed_across_its_memory() -> None:
    """Hundreds of batches: an engine that just keeps up loses nothing, one that is too slow by a tenth a tenth."""
    profile = linear_profile("steady", alpha_s=0.0001, beta_s=1.0, max_batch_size=2)
    assert fewest_lost([1.01 * i for i in range(1000)], profile, SLO_S, at_most=200) == 0
    lost = fewest_lost([0.9 * i for i in range(1000)], profile, SLO_S, at_most=200)
    assert lost is not None
    assert 85 <= lost <= 105
