"""Comparison of policies with tuned settings."""

from dataclasses import replace
from functools import partial

import pytest

from penstock.planning.comparison import (
    Effort,
    RaceCase,
    bounds_of,
    gather_races,
    highest,
    measure_load,
    over_seeds,
    pieces_of,
    races_as_json,
    run_contender,
    run_piece,
    tune_setting,
)
from penstock.planning.policies import Contender, PolicyProblem, PolicySetting, TritonPolicy, settings_of
from penstock.planning.profile import H200, V100
from penstock.planning.simulation import EngineModel

SMALL = Effort(count=3000, seeds=(1, 2), resolution=0.02)
CASE = RaceCase(PolicyProblem(EngineModel(V100), 0.015), "poisson", effort=SMALL)


def test_a_search_finds_the_edge_and_a_floor_costs_one_look() -> None:
    """Bisection to the resolution from below; nothing where the floor does not hold."""
    looks: list[float] = []

    def holds(rate: float) -> bool:
        looks.append(rate)
        return rate <= 333.0

    found = highest(holds, top=1000.0, resolution=0.01)
    assert 333.0 * 0.98 < found <= 333.0
    looks.clear()
    assert highest(holds, top=1000.0, resolution=0.01, floor=400.0) == 0.0
    assert looks == [400.0]
    assert highest(lambda rate: False, top=1000.0, resolution=0.01) == 0.0


def test_a_rate_says_how_sure_it_is() -> None:
    """Student's interval of the mean; wider for the same spread with fewer seeds; none at all from one."""
    two, four = over_seeds([99.0, 101.0]), over_seeds([99.0, 101.0, 99.0, 101.0])
    assert (two.per_s, four.per_s) == (100.0, 100.0)
    assert two.plus_minus == pytest.approx(12.71)
    assert four.plus_minus < two.plus_minus / 5
    assert over_seeds([5.0]).plus_minus == float("inf")


@pytest.mark.parametrize("contender", Contender)
def test_every_contender_has_settings_and_each_makes_a_fresh_policy(contender: Contender) -> None:
    """No two settings of a grid read the same, and a policy is never used for two replays."""
    settings = settings_of(contender, CASE.problem)
    assert len({setting.label for setting in settings}) == len(settings) >= 1
    assert settings[0].make() is not settings[0].make()
    over_a_way = replace(CASE.problem, engine=EngineModel(V100, before_s=0.001))
    if contender is not Contender.OURS:
        assert len(settings_of(contender, over_a_way)) == 2 * len(settings)


def test_ours_has_its_defaults_and_room_for_what_the_slo_allows() -> None:
    """1,024 requests wait at most, or as many as the engine could answer inside the SLO: 15,130/s for 0.1 s 1,514."""
    short, long = (settings_of(Contender.OURS, PolicyProblem(EngineModel(H200), slo_s)) for slo_s in (0.050, 0.100))
    assert ([one.label for one in short], [one.label for one in long]) == (["defaults"], ["max_queue_size 1514"])


def test_tuning_takes_the_better_knobs() -> None:
    """Whichever is tried first: batches of up to 64 beat one by one."""
    good, bad = PolicySetting("64", partial(TritonPolicy, 64)), PolicySetting("one", partial(TritonPolicy, 1))
    assert tune_setting(CASE, [bad, good]) is good
    assert tune_setting(CASE, [good, bad]) is good


def test_ours_beats_batch_1_and_none_beats_what_is_possible() -> None:
    """15 ms on the V100's profile, in small: between the naive way and the schedule that knows the future."""
    case = replace(CASE, effort=Effort(count=2000, seeds=(1, 2), resolution=0.05))
    ours, bounds = run_contender(case, Contender.OURS).rate.per_s, bounds_of(case)
    (naive,) = (one for one in settings_of(Contender.BATCH_1, case.problem) if one.label == "timeout 12 ms")
    assert bounds.possible is not None
    assert ours <= bounds.possible.per_s * 1.06 <= bounds.capacity * 1.06
    assert measure_load(case, naive, ours / 3).within < 0.6


def test_a_plan_gathers_its_pieces_in_any_order() -> None:
    """Done backwards: rows in the order of the contenders, as plain JSON values; two instances double the bounds."""
    cases = [
        replace(CASE, problem=PolicyProblem(EngineModel(V100, instances=2), 0.015)),
        replace(CASE, pattern="periodic"),
    ]
    who = [Contender.NEXUS, Contender.OURS]
    small = [replace(case, effort=Effort(count=1000, seeds=(1, 2), resolution=0.1)) for case in cases]
    pieces = pieces_of(small, who, (1.5,))
    races = gather_races(small, who, [run_piece(piece) for piece in reversed(pieces)])
    assert [[row.contender for row in race.rows] for race in races] == [who, who]
    assert races[0].bounds.possible is None
    assert races[0].bounds.nexus == 2 * races[1].bounds.nexus
    found = races_as_json(races)["races"]
    assert isinstance(found, list)
    assert [(race["arrivals"], race["slo_ms"], len(race["rows"])) for race in found] == [
        ("poisson", 15.0, 2),
        ("periodic", 15.0, 2),
    ]
