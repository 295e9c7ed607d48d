"""What a command line changes in a scenario, and what it cannot."""

import pytest

from penstock_load.scenario import (
    ScenarioError,
    Shape,
    read_scenario,
    with_duration,
    with_model,
    with_rate,
    with_replay,
    with_slo,
)


def test_overrides_change_the_judged_phases_alone() -> None:
    """Warm-up, capacity and ladder stay what the scenario says."""
    before = read_scenario("image-steady")
    after = with_slo(with_duration(with_model(before, "fastestdet"), 3), 80)
    assert (after.requests[0].model, after.slo_p99_ms) == ("fastestdet", 80)
    assert after.phases[:-1] == before.phases[:-1]
    assert after.phases[-1].seconds == 3


def test_rate_of_ones_own_leaves_nothing_that_asks_for_more() -> None:
    """No capacity is measured and no ladder climbed: the server carries the rate that was asked about."""
    after = with_rate(read_scenario("image-steady"), 40)
    assert [phase.name for phase in after.phases] == ["warm-up", "steady"]
    steady = after.phases[-1]
    assert steady.arrivals is not None
    assert (steady.arrivals.rate, steady.arrivals.unit, steady.arrivals.shape) == (40, "per_s", Shape.POISSON)


def test_replay_lasts_as_long_as_its_recording() -> None:
    """The judged phase sends as the file says, and its own length goes."""
    phase = with_replay(read_scenario("image-steady"), "yesterday.jsonl", speed=2).phases[-1]
    assert phase.arrivals is not None
    assert (phase.arrivals.file, phase.arrivals.speed, phase.seconds) == ("yesterday.jsonl", 2, 0)


def test_overrides_that_mean_nothing_are_refused() -> None:
    """One sentence: what was given, and why it does not apply."""
    with pytest.raises(ScenarioError, match="counts reloads"):
        with_duration(read_scenario("cold-start"), 3)
    with pytest.raises(ScenarioError, match="has burst"):
        with_rate(read_scenario("image-burst"), 3)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ScenarioError, match="finite number above 0"):
            with_slo(read_scenario("image-steady"), value)
