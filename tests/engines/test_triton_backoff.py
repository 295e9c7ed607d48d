"""How long a process that ended waits for its next start."""

import pytest

from penstock.engines.triton.supervisor import RestartBackoff


def test_delays_double_from_a_fifth_of_a_second_to_the_cap() -> None:
    """The first restart is at once, the tenth waits half a minute and no longer."""
    backoff = RestartBackoff(uniform=lambda: 0.0)
    delays = [backoff.next_delay_s(0.0) for _ in range(10)]
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0])


@pytest.mark.parametrize(("ran_s", "expected_s"), [(59.9, 0.8), (60.0, 0.2)])
def test_delay_after_a_run_starts_anew_only_where_it_was_stable(ran_s: float, expected_s: float) -> None:
    """A minute of work forgives what was before; less does not."""
    backoff = RestartBackoff(uniform=lambda: 0.0)
    backoff.next_delay_s(0.0)
    backoff.next_delay_s(1.0)
    backoff.live(100.0)
    assert backoff.next_delay_s(100.0 + ran_s) == pytest.approx(expected_s)


def test_time_waited_between_runs_is_not_stability() -> None:
    """A start that never became live does not profit from the last run's beginning."""
    backoff = RestartBackoff(uniform=lambda: 0.0)
    backoff.live(0.0)
    assert backoff.next_delay_s(1.0) == pytest.approx(0.2)
    assert backoff.next_delay_s(100.0) == pytest.approx(0.4)


def test_jitter_shortens_by_a_fifth_at_most() -> None:
    """The random part never lengthens the delay beyond the cap."""
    longest, shortest = RestartBackoff(uniform=lambda: 0.0), RestartBackoff(uniform=lambda: 1.0)
    for _ in range(12):
        delay_s = longest.next_delay_s(0.0)
        assert shortest.next_delay_s(0.0) == pytest.approx(0.8 * delay_s)
        assert delay_s <= 30.0


def test_thousands_of_restarts_keep_the_cap() -> None:
    """A service that has been down for a week still has a finite delay."""
    backoff = RestartBackoff(uniform=lambda: 0.0)
    assert max(backoff.next_delay_s(0.0) for _ in range(5000)) == 30.0
