"""Retry budget, circuit and outliers: pure, by hand's clock."""

import random

import pytest

from penstock.engines.call_options import RetryBudget
from penstock.engines.failures import CircuitBreaker, CircuitState, Outliers


def test_retries_of_a_storm_are_a_tenth_of_the_calls() -> None:
    """Every call of 100 s fails and asks for a second one: a tenth of them, the floor and what was saved, no more."""
    budget, now = RetryBudget(), 50.0
    for _ in range(10_000):
        budget.calls += 1
        budget.take(now)
        now += 0.01
    assert 1_000 <= budget.taken <= 1_000 + 100 + 33
    assert budget.taken + budget.refused == 10_000


def test_second_try_that_its_replica_counts_fills_no_bucket() -> None:
    """A replica counts whatever it is sent; a second sending is none of those that a tenth is allowed of."""
    budget = RetryBudget(share=0.1, floor_per_s=0.0, burst=4.0)
    for _ in range(10_000):
        budget.calls += 1
        if budget.take_elsewhere(50.0):
            budget.calls += 1
    assert 990 <= budget.taken <= 1_000 + 4
    assert budget.calls == 10_000


def test_a_quiet_gateway_may_retry_and_cannot_save_up_for_a_storm() -> None:
    """The floor fills the bucket; a day without a failure fills it no further."""
    budget = RetryBudget(share=0.1, floor_per_s=1.0, burst=3.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [budget.take(1.0) for _ in range(2)] == [True, False]
    budget.calls += 1_000_000
    assert [budget.take(90_000.0) for _ in range(4)] == [True, True, True, False]


def test_circuit_opens_when_late_calls_and_a_probe_agree_and_closes_by_a_probe() -> None:
    """Suspect after k failures in a row, open when the probe is not answered; one probe at a time, further apart."""
    circuit = CircuitBreaker(failures=3, max_pause_s=0.5)
    for _ in range(2):
        circuit.failed(1.0)
    assert (circuit.state, circuit.is_probe_due(1.0)) == (CircuitState.CLOSED, False)
    circuit.failed(1.0)
    assert (circuit.state, circuit.is_probe_due(1.0), circuit.is_passable) == (CircuitState.SUSPECT, True, True)
    circuit.probe_unanswered(2.0)
    assert (circuit.is_passable, circuit.openings) == (False, 1)

    now = 2.0
    for pause_s in (0.2, 0.4, 0.5, 0.5):
        assert not circuit.is_probe_due(now + pause_s - 0.01)
        now += pause_s
        assert circuit.is_probe_due(now)
        circuit.probing()
        assert (circuit.state, circuit.is_probe_due(now), circuit.is_passable) == (CircuitState.HALF_OPEN, False, False)
        circuit.probe_unanswered(now)
    circuit.probe_answered(now)
    assert (circuit.state, circuit.failures, circuit.openings) == (CircuitState.CLOSED, 0, 1)


def test_circuit_of_a_slow_model_stays_closed() -> None:
    """Calls late by the hundred, probes answered: never open, and a probe a second at most."""
    circuit, now, probes = CircuitBreaker(failures=3), 0.0, 0
    while now < 10.0:
        circuit.failed(now)
        assert circuit.is_passable
        if circuit.is_probe_due(now):
            probes += 1
            circuit.probe_answered(now)
        now += 0.01
    assert 5 <= probes <= 11


def test_circuit_counts_failures_in_a_row_only_and_suspects_a_broken_connection_at_once() -> None:
    """An answer between them starts the count anew; no connection is more than a late call."""
    circuit = CircuitBreaker(failures=2)
    for _ in range(10):
        circuit.failed(0.0)
        circuit.answered()
    assert circuit.state is CircuitState.CLOSED
    circuit.failed(0.0, is_broken=True)
    assert circuit.state is CircuitState.SUSPECT


def outliers(count: int, first_s: float = 5.0) -> Outliers:
    return Outliers(count, first_s=first_s, uniform=lambda: 0.0)


def ejected(group: Outliers, count: int, now: float) -> list[int]:
    return [index for index in range(count) if group.is_ejected(index, now)]


def test_bad_replica_is_ejected_and_comes_back_after_ever_longer_times() -> None:
    """5 s, 10 s, 20 s …, on trial each time: one more failure is enough, one good answer makes it whole."""
    group, now = outliers(3), 100.0
    assert [group.failed(1, now) for _ in range(5)] == [False, False, False, False, True]
    for seconds in (5.0, 10.0, 20.0, 40.0):
        assert ejected(group, 3, now + seconds - 0.01) == [1]
        now += seconds
        assert (ejected(group, 3, now), group.is_on_trial(1)) == ([], True)
        assert group.failed(1, now)
    assert group.ejections(1) == 5
    now += 80.0
    assert ejected(group, 3, now) == []
    group.succeeded(1, now)
    assert not group.is_on_trial(1)
    assert [group.failed(1, now) for _ in range(4)] == [False] * 4


def test_ejections_are_forgiven_by_time_in_service() -> None:
    """A replica that did well for long is ejected for the first time again."""
    group = outliers(2)
    for _ in range(5):
        group.failed(0, 10.0)
    assert ejected(group, 2, 15.0) == []
    group.succeeded(0, 15.0)
    now = 15.0 + 61.0
    for _ in range(5):
        group.failed(0, now)
    assert ejected(group, 2, now + 4.9) == [0]
    assert ejected(group, 2, now + 5.0) == []


def test_replica_that_did_well_until_it_broke_is_out_after_as_many_failures() -> None:
    """Its good past does not keep it in."""
    replicas = outliers(3)
    for _ in range(200):
        for index in range(3):
            replicas.succeeded(index, 1.0)
    assert [replicas.failed(1, 1.0 + n / 100) for n in range(5)] == [False] * 4 + [True]


def test_what_fails_everywhere_ejects_no_replica() -> None:
    """A model that raises, or a deadline that none can keep, is no replica's fault."""
    group, now = outliers(3), 0.0
    for turn in range(3_000):
        assert not group.failed(turn % 3, now)
        now += 0.01


def test_replica_that_fails_every_other_call_is_ejected() -> None:
    """Not five in a row: its share of failures tells."""
    group, now, turn = outliers(3), 0.0, 0
    while not ejected(group, 3, now):
        for index in (0, 1):
            group.succeeded(index, now)
        (group.failed if turn % 3 else group.succeeded)(2, now)
        now, turn = now + 0.05, turn + 1
        assert turn < 200
    assert ejected(group, 3, now) == [2]


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_never_more_than_half_are_ejected_and_never_all(count: int, most: int) -> None:
    """Whatever comes, in whatever order."""
    chance, group, now, seen = random.Random(3), outliers(count, first_s=2.0), 0.0, 0
    for _ in range(5_000):
        index = chance.randrange(count)
        (group.failed if chance.random() < (0.9 if index else 0.02) else group.succeeded)(index, now)
        now += 0.01
        seen = max(seen, len(ejected(group, count, now)))
        assert len(ejected(group, count, now)) <= most
    assert seen == most
