"""The gateway's own queue where the engine is not as its profile says: a way to it, noise, slow spells, outliers."""

import random
from dataclasses import replace

import pytest

from penstock.planning.policies import Contender, PolicyProblem, settings_of
from penstock.planning.profile import V100
from penstock.planning.simulation import Arrivals, EngineModel, SimulationResult, poisson, simulate
from tests.batching.driving import OddEngine

SLO_S = 0.015
FROM_S, UNTIL_S, LEARNT_S = 1.0, 2.0, 0.25


def replay(engine: EngineModel, arrivals: Arrivals) -> SimulationResult:
    """Ours, with its defaults."""
    (setting,) = settings_of(Contender.OURS, PolicyProblem(engine, SLO_S))
    return simulate(setting.make(), engine, arrivals, slo_s=SLO_S)


def by_phase(arrivals: Arrivals) -> Arrivals:
    """Those before, in and after a slow spell as if they were three clients, and a fourth while it is learnt."""
    bounds = ((FROM_S, "before"), (FROM_S + LEARNT_S, "learning"), (UNTIL_S, "slow"), (UNTIL_S + LEARNT_S, "learning"))
    names = tuple(next((name for end, name in bounds if at < end), "after") for at in arrivals.times)
    return replace(arrivals, clients=names)


@pytest.mark.parametrize("way_s", [0.0002, 0.0005])
def test_a_way_to_the_engine_is_learnt_and_makes_none_late(way_s: float) -> None:
    """As long there as back; the door counts it, so that what is taken is answered in time."""
    outcome = replay(EngineModel(V100, before_s=way_s, after_s=way_s), poisson(4000.0, 6_000, 5))
    assert outcome.late + outcome.expired <= 0.01 * outcome.offered
    assert outcome.share >= 0.98


def test_noise_costs_some_refusals_and_hardly_any_late_answer() -> None:
    """Calls that vary by a fifth: the guard keeps what is promised."""
    chance = random.Random(3)
    outcome = replay(OddEngine(V100, factor=lambda _: chance.lognormvariate(0.0, 0.2)), poisson(3600.0, 6_000, 5))
    assert outcome.late + outcome.expired <= 0.01 * outcome.offered
    assert outcome.share >= 0.95


def test_a_spell_of_an_engine_three_times_as_slow_is_learnt_and_unlearnt() -> None:
    """A quarter of a second after it began, half of the requests are in time; as long after its end, all as before."""
    engine = OddEngine(V100, factor=lambda begin: 3.0 if FROM_S <= begin < UNTIL_S else 1.0)
    outcome = replay(engine, by_phase(poisson(600.0, 2000, 5)))
    shares = {name: within / offered for name, (offered, within) in outcome.by_client.items()}
    assert shares["before"] >= 0.99
    assert shares["after"] >= 0.99
    assert shares["slow"] >= 0.5
    assert outcome.late <= 0.03 * outcome.offered


def test_one_call_of_a_hundred_times_does_not_move_the_fit() -> None:
    """After each outlier the next calls are expected as before: what is lost is lost while it runs."""
    chance = random.Random(2)
    engine = OddEngine(V100, factor=lambda _: 1.0 if chance.randrange(400) else 100.0)
    outcome = replay(engine, poisson(1000.0, 6000, 5))
    blocked_s = outcome.busy_s - sum(V100.seconds(rows) * calls for rows, calls in outcome.batch_rows.items())
    assert blocked_s > 0.5
    assert outcome.offered - outcome.within_slo <= 1000.0 * (blocked_s + 0.3)


def test_two_instances_serve_twice_as_many() -> None:
    """At twice a rate that one serves, 99 % are in time."""
    assert replay(EngineModel(V100), poisson(4300.0, 5_000, 5)).share >= 0.99
    assert replay(EngineModel(V100, instances=2), poisson(8600.0, 10_000, 5)).share >= 0.99
