"""The best possible schedule, beside one that tries everything."""

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from server.planning.clairvoyant import fewest_lost
from server.planning.profile import Profile, line

SLO_S = 7.0


def fewest_by_trying(times: tuple[float, ...], profile: Profile) -> int:
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
    profile = line("plain", alpha_s=alpha, beta_s=beta, max_batch_size=most)
    assert fewest_lost(times, profile, SLO_S, at_most=len(times)) == fewest_by_trying(times, profile)


def test_more_than_allowed_is_none() -> None:
    """Three at one moment before an engine that answers one a deadline: two are lost, and one was allowed."""
    profile = line("slow", alpha_s=4.0, beta_s=0.0, max_batch_size=1)
    assert fewest_lost((0.0, 0.0, 0.0), profile, SLO_S, at_most=2) == 2
    assert fewest_lost((0.0, 0.0, 0.0), profile, SLO_S, at_most=1) is None


def test_a_long_run_is_followed_across_its_memory() -> None:
    """Hundreds of batches: an engine that just keeps up loses nothing, one that is too slow by a tenth a tenth."""
    profile = line("steady", alpha_s=0.0001, beta_s=1.0, max_batch_size=2)
    assert fewest_lost([1.01 * i for i in range(1000)], profile, SLO_S, at_most=200) == 0
    lost = fewest_lost([0.9 * i for i in range(1000)], profile, SLO_S, at_most=200)
    assert lost is not None
    assert 85 <= lost <= 105
