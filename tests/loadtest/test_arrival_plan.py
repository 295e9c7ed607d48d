"""Arrivals as locust users, without locust: which number of them at which moment, and when each asks."""

import pytest

from penstock_load.scenario import (
    Arrivals,
    Kind,
    Phase,
    RequestSpec,
    Scenario,
    ScenarioError,
    Shape,
    Unit,
    read_scenario,
    scenario_names,
)
from penstock_load.users.arrival_plan import ArrivalPlan, Pace, PlanCursor


def scenario(*phases: Phase) -> Scenario:
    return Scenario(name="mine", about="", requests=(RequestSpec(kind=Kind.REST, model="m"),), phases=phases)


def constant(rate: float, seconds: float, name: str = "steady") -> Phase:
    return Phase(name=name, seconds=seconds, arrivals=Arrivals(shape=Shape.CONSTANT, rate=rate), is_judged=True)


def test_phases_with_callers_are_left_out_and_the_others_follow_each_other() -> None:
    """The plan begins with the first phase that has arrivals and ends with the last."""
    plan = ArrivalPlan(
        scenario(Phase(name="warm-up", seconds=9, callers=4), constant(5, 2, "a"), constant(7, 3, "b")),
        capacity_per_s=None,
    )
    found = [plan.at(at_s) for at_s in (0.5, 1.5, 2.5, 4.5, 5.5)]
    assert [(one.phase.name, one.users) if one else None for one in found] == [
        ("a", 5),
        ("a", 5),
        ("b", 7),
        ("b", 7),
        None,
    ]


@pytest.mark.parametrize("rate", [0.1, 0.4, 2.5, 20, 33.3])
def test_users_and_their_gap_come_to_the_rate(rate: float) -> None:
    """Users are whole numbers; what rounding takes the gap gives back."""
    moment = ArrivalPlan(scenario(constant(rate, 10)), capacity_per_s=None).at(1)
    assert moment is not None
    assert moment.users / moment.gap_s == pytest.approx(rate)


def test_without_a_rate_there_are_no_requests() -> None:
    """Between bursts from 0 there is no user."""
    bursts = Arrivals(shape=Shape.BURST, rate=0, to_rate=10, every_s=5, burst_s=1)
    plan = ArrivalPlan(scenario(Phase(name="bursts", seconds=10, arrivals=bursts)), capacity_per_s=None)
    assert [moment.users if moment else None for moment in map(plan.at, (0.5, 1.5, 5.5, 6.5))] == [10, 0, 10, 0]


def test_a_share_of_the_capacity_is_of_the_one_that_was_said() -> None:
    """of_capacity means --capacity; without one the error says what to give."""
    half = Arrivals(shape=Shape.POISSON, unit=Unit.OF_CAPACITY, rate=0.5)
    mine = scenario(Phase(name="steady", seconds=10, arrivals=half))
    moment = ArrivalPlan(mine, capacity_per_s=60).at(1)
    assert moment is not None
    assert moment.users == 30
    assert moment.is_poisson
    with pytest.raises(ScenarioError, match="--capacity REQUESTS_PER_S"):
        ArrivalPlan(mine, capacity_per_s=None)


def test_what_locust_cannot_do_says_who_can() -> None:
    """Reloads have no arrivals, and a recording has no number of users."""
    replay = Phase(name="again", arrivals=Arrivals(shape=Shape.REPLAY, file="records.jsonl"))
    for mine in (scenario(Phase(name="reloads", reloads=5)), scenario(replay)):
        with pytest.raises(ScenarioError, match="penstock load run mine"):
            ArrivalPlan(mine, capacity_per_s=10)


@pytest.mark.parametrize("name", [name for name in scenario_names() if name not in ("cold-start", "video-streams")])
def test_every_shipped_scenario_but_reloads_has_a_plan(name: str) -> None:
    """A capacity is all that they need; video streams are searched for, not arrived at."""
    assert ArrivalPlan(read_scenario(name), capacity_per_s=100).at(0.5) is not None


def test_a_walk_accounts_for_what_was_meant() -> None:
    """Each phase gets its seconds and its requests, also when the run is stopped in the middle of one."""
    walk = PlanCursor(ArrivalPlan(scenario(constant(5, 2, "a"), constant(10, 8, "b")), capacity_per_s=None))
    for at_s in (0.0, 1.0, 2.0, 3.0):
        walk.step(at_s)
    walk.stop(3.5)
    assert {name: (spent.seconds, spent.intended) for name, spent in walk.spent.items()} == {
        "a": (2.0, 10.0),
        "b": (1.5, 15.0),
    }


def test_a_walk_ends_after_the_last_phase() -> None:
    """Half a second before the end there is no coming second to decide about."""
    walk = PlanCursor(ArrivalPlan(scenario(constant(5, 2)), capacity_per_s=None))
    assert [walk.step(at_s) is None for at_s in (0.0, 1.0, 1.6, 2.0)] == [False, False, True, True]


def test_a_crowd_is_spread_over_the_second() -> None:
    """A hundred users that start together ask in every tenth of the second, about ten of them in each."""
    first = [Pace(number, 0.0).wait_s(0.0, gap_s=1.0, is_poisson=False) for number in range(100)]
    tenths = [sum(1 for wait_s in first if int(wait_s * 10) == tenth) for tenth in range(10)]
    assert sum(tenths) == 100
    assert all(8 <= count <= 12 for count in tenths)


def sent(pace: Pace, seconds: float, *, answer_s: float, is_poisson: bool) -> int:
    """How many requests a user sends in that time if every answer takes so long."""
    now_s, count = 0.0, 0
    while True:
        now_s += pace.wait_s(now_s, gap_s=1.0, is_poisson=is_poisson)
        if now_s >= seconds:
            return count
        count += 1
        now_s += answer_s


@pytest.mark.parametrize("answer_s", [0.001, 0.3, 0.99])
def test_answers_within_the_gap_delay_no_user(answer_s: float) -> None:
    """As many requests as seconds, however late the answers come within them."""
    assert sent(Pace(0, 0.0), 100, answer_s=answer_s, is_poisson=False) == 100


def test_poisson_users_keep_the_rate_on_average() -> None:
    """A hundred users, a hundred seconds: ten thousand, give or take four standard deviations."""
    total = sum(sent(Pace(number, 0.0), 100, answer_s=0.05, is_poisson=True) for number in range(100))
    assert abs(total - 10_000) < 400


def test_late_answers_are_caught_up_on_by_a_second_only() -> None:
    """After a stall of ten seconds one request follows at once, and then the pace is as before."""
    pace = Pace(0, 0.0)
    assert pace.wait_s(0.0, gap_s=1.0, is_poisson=False) == 0.0
    assert [pace.wait_s(10.0, gap_s=1.0, is_poisson=False) for _ in range(3)] == [0.0, 0.0, 1.0]
