"""What can be said without a replay."""

import pytest

from server.planning.bounds import capacity, even_goodput, even_rate, nexus_rate
from server.planning.clairvoyant import fewest_lost
from server.planning.profile import H200, V100, line


@pytest.mark.parametrize(("slo_ms", "rate"), [(7, 2894), (15, 4975), (50, 6242)])
def test_nexus_bound_of_the_v100_is_the_published_one(slo_ms: float, rate: int) -> None:
    """2 t(b) <= SLO: 2,894, 4,975 and 6,242 requests a second; twice as many with two instances."""
    assert round(nexus_rate(V100, slo_ms / 1e3)) == rate
    assert nexus_rate(V100, slo_ms / 1e3, instances=2) == pytest.approx(2 * rate, abs=2)


def test_bounds_are_zero_where_one_row_takes_longer() -> None:
    """An SLO below one call cannot be met, below two calls not promised."""
    assert capacity(V100, 0.002) == even_rate(V100, 0.002) == 0.0
    assert nexus_rate(V100, 0.004) == 0.0 < capacity(V100, 0.004)


def test_the_largest_batch_limits_capacity() -> None:
    """The H200's engine takes 64 rows at most: 64 in 4.23 ms, whatever the SLO allows."""
    assert capacity(H200, 1.0) == pytest.approx(64 / 4.23e-3)


@pytest.mark.parametrize("slo_s", [0.007, 0.015, 0.05])
def test_evenly_spaced_requests_at_the_even_rate_can_all_be_answered(slo_s: float) -> None:
    """The bound for even arrivals is reached by some schedule, and 8 % above it by none."""
    rate = even_rate(V100, slo_s)
    assert fewest_lost([i / (rate * 0.995) for i in range(2000)], V100, slo_s, at_most=20) is not None
    assert fewest_lost([i / (rate * 1.08) for i in range(6000)], V100, slo_s, at_most=60) is None


def test_goodput_under_overload_grows_with_the_rate_towards_capacity() -> None:
    """More requests to choose from make fuller batches; never more than offered, never more than capacity."""
    plain = line("plain", alpha_s=0.002, beta_s=0.0001, max_batch_size=64)
    rates = (100.0, 1000.0, 3000.0, 6000.0, 12000.0)
    found = [even_goodput(plain, 0.006, rate) for rate in rates]
    assert found[:2] == [100.0, 1000.0]
    assert found == sorted(found)
    assert found[-1] <= capacity(plain, 0.006)
