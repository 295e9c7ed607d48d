"""Arrivals in locust, without locust: which rate at which moment, and when a process sends."""

import pytest

from penstock_load.scenario import Arrivals, Kind, Phase, RequestSpec, Scenario, ScenarioError, Shape, Unit
from penstock_load.users.arrival_plan import STEP_S, ArrivalPlan, PlanCursor, SendClock


def scenario(*phases: Phase) -> Scenario:
    return Scenario(name="mine", about="", requests=(RequestSpec(kind=Kind.REST, model="m"),), phases=phases)


def constant(rate: float, seconds: float, name: str = "steady") -> Phase:
    return Phase(name=name, seconds=seconds, arrivals=Arrivals(shape=Shape.CONSTANT, rate=rate), is_judged=True)


def test_phases_with_callers_are_left_out_and_the_others_follow_each_other() -> None:
    """Each phase gets its seconds, also if the run is stopped in the middle of one; nothing follows the last."""
    plan = ArrivalPlan(
        scenario(Phase(name="warm-up", seconds=9, callers=4), constant(5, 2, "a"), constant(7, 3, "b")),
        capacity_per_s=None,
    )
    cursor = PlanCursor(plan)
    found = [cursor.step(at_s) for at_s in (0.0, 1.0, 2.0, 3.0)]
    assert [(one.phase.name, one.rate) if one else None for one in found] == [("a", 5), ("a", 5), ("b", 7), ("b", 7)]
    cursor.stop(3.5)
    assert cursor.seconds == {"a": 2.0, "b": 1.5}
    assert cursor.intended == {"a": 10.0, "b": 10.5}
    assert [cursor.step(at_s) is None for at_s in (4.0, 4.6, 5.0)] == [False, True, True]


def test_a_share_of_the_capacity_is_of_the_given_one() -> None:
    """of_capacity means --capacity; without one the error says what to give."""
    half = Arrivals(shape=Shape.POISSON, unit=Unit.OF_CAPACITY, rate=0.5)
    mine = scenario(Phase(name="steady", seconds=10, arrivals=half))
    moment = ArrivalPlan(mine, capacity_per_s=60).at(1)
    assert moment is not None
    assert (moment.rate, moment.is_poisson) == (30, True)
    with pytest.raises(ScenarioError, match="--capacity REQUESTS_PER_S"):
        ArrivalPlan(mine, capacity_per_s=None)


def test_what_locust_cannot_do_names_the_command_that_can() -> None:
    """Reloads have no arrivals, and a recording no rate."""
    replay = Phase(name="again", arrivals=Arrivals(shape=Shape.REPLAY, file="records.jsonl"))
    for mine in (scenario(Phase(name="reloads", reloads=5)), scenario(replay)):
        with pytest.raises(ScenarioError, match="penstock load run mine"):
            ArrivalPlan(mine, capacity_per_s=10)


def due(clock: SendClock, rate: float, until_s: float, *, is_poisson: bool = False) -> list[float]:
    """The moments until then at which a request is due."""
    found, at_s = [], 0.0
    while at_s < until_s - 1e-9:
        at_s, is_due = clock.step(rate, is_poisson=is_poisson)
        if is_due:
            found.append(at_s)
    return found


def test_constant_arrivals_are_evenly_spaced_at_any_rate() -> None:
    """Also below one a second; without a rate nothing is due, and the clock goes on, a tenth of a second at a time."""
    clock = SendClock(0.0, seed=1)
    assert clock.step(0.0, is_poisson=False) == (STEP_S, False)
    assert due(SendClock(0.0, seed=1), 0.4, 10.0) == pytest.approx([2.5, 5.0, 7.5, 10.0])
    assert len(due(SendClock(0.0, seed=1), 250.0, 2.0)) == 500


def test_poisson_arrivals_keep_the_rate_on_average() -> None:
    """Ten thousand, give or take four standard deviations; processes with other seeds send at other moments."""
    total = len(due(SendClock(0.0, seed=1), 100.0, 100.0, is_poisson=True))
    assert abs(total - 10_000) < 400
    assert due(SendClock(0.0, seed=1), 9.0, 1.0, is_poisson=True) != due(
        SendClock(0.0, seed=2), 9.0, 1.0, is_poisson=True
    )
