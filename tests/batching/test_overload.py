"""Overload: much is answered in time, the rest is refused, and no client is starved."""

import pytest

from penstock.gateway.batching.entries import Batch, Entry
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import BatchQueue
from penstock.planning.bounds import nexus_rate
from penstock.planning.profile import V100, linear_profile
from penstock.planning.simulation import Arrivals, EngineModel, SimulationResult, poisson, simulate
from penstock.protocol.errors import Overloaded
from tests.batching.driving import OddEngine

SLO_S = 0.015
SUSTAINED = 4700.0  # requests a second that V100 answers to 99 % within 15 ms: what the replay finds


def replay(arrivals: Arrivals, engine: EngineModel | None = None) -> SimulationResult:
    """Our queue before the profile of a V100."""
    queue = BatchQueue("m", BatchOptions(max_batch_size=512, slo_s=SLO_S, max_queue_size=4096))
    return simulate(queue, engine or EngineModel(V100), arrivals, slo_s=SLO_S, warm_up=0.15)


def test_sustained_rate_is_answered() -> None:
    """One in a hundred is lost at most at the rate that the queue is said to sustain."""
    assert replay(poisson(SUSTAINED, 20000, 3)).share >= 0.99


@pytest.mark.parametrize("times", [1.5, 3.0])
def test_overload_goodput_stays_and_the_rest_is_refused(times: float) -> None:
    """More requests do not make fewer answers; none is answered late, and time-outs are rare beside refusals."""
    outcome = replay(poisson(SUSTAINED * times, 8000, 3))

    assert outcome.goodput >= SUSTAINED
    assert outcome.late + outcome.expired <= outcome.refused / 50


def test_overload_with_long_deadlines_forms_no_batch_before_the_engine_takes_it() -> None:
    """Rows that save little by sharing a call wait for more all the same: what they save is what is missing."""
    slow = linear_profile("v100 slowed ten times", alpha_s=19.8e-3, beta_s=1.475e-3, max_batch_size=512)
    nexus = nexus_rate(slow, 0.5)
    queue = BatchQueue("m", BatchOptions(max_batch_size=512, slo_s=0.5, max_queue_size=1024))

    outcome = simulate(queue, EngineModel(slow), poisson(1.5 * nexus, 10_000, 11), slo_s=0.5, warm_up=0.3)

    assert outcome.goodput >= nexus  # 0.97 of it where early batches are waiting at the engine's door


def test_flood_of_one_client_costs_the_others_nothing() -> None:
    """Five clients of 100 requests a second beside one of 15,000 have all of theirs answered in time."""
    named = [(at, "flood") for at in poisson(15000.0, 12000, 1).times]
    for number in range(5):
        named += [(at, f"light {number}") for at in poisson(100.0, 80, 10 + number).times]
    named.sort()

    outcome = replay(Arrivals(tuple(at for at, _ in named), tuple(client for _, client in named)))

    assert outcome.goodput >= 0.85 * nexus_rate(V100, SLO_S)
    for client, (offered, within_slo) in outcome.by_client.items():
        if client != "flood":
            assert within_slo >= 0.97 * offered, client


def test_equal_clients_get_equal_shares() -> None:
    """Three that ask for the same are refused alike."""
    times = poisson(9000.0, 10000, 5).times
    outcome = replay(Arrivals(times, tuple(f"client {number * 7 % 3}" for number in range(len(times)))))

    shares = [within_slo / offered for offered, within_slo in outcome.by_client.values()]
    assert max(shares) - min(shares) < 0.05


def test_engine_ten_times_slower_is_outlived() -> None:
    """What cannot be met is refused, late answers are few, and when the engine recovers so does the goodput."""
    slow = OddEngine(V100, factor=lambda begin: 10.0 if 2.0 <= begin < 4.0 else 1.0)
    outcome = replay(poisson(2000.0, 16000, 3), slow)

    assert outcome.late < 0.01 * outcome.offered
    assert outcome.share > 0.60  # 0.71 were answered by one who knew


def test_steady_overload_is_refused_on_arrival() -> None:
    """At two and a half times a slow engine's capacity nearly all refusals come on arrival."""
    queue, now, free_at, delivered_s, batch = BatchQueue("m", BatchOptions(max_batch_size=8)), 100.0, 0.0, [], None
    answered = 0
    for number in range(2_000):
        now = 100.0 + number / 160  # the engine does 8 rows in 0.12 s
        while batch is not None and free_at <= now:
            queue.done(batch, free_at)
            answered += batch.rows
            batch = _next(queue, free_at, delivered_s)
            free_at += 0.0 if batch is None else 0.04 + 0.01 * batch.rows
        try:
            queue.push(Entry("k", 1, 8, now, now + 0.6), now)
        except Overloaded:
            delivered_s.append(0.0)
        if batch is None:
            batch = _next(queue, now, delivered_s)
            free_at = now + (0.0 if batch is None else 0.04 + 0.01 * batch.rows)

    assert sum(waited_s <= 0.05 for waited_s in delivered_s) > 0.8 * len(delivered_s)
    assert answered > 0.9 * (now - 100.0) * 8 / 0.12


def _next(queue: BatchQueue, now: float, delivered_s: list[float]) -> Batch | None:
    """The batch that goes now; the errors of those that are given up say how long they waited."""
    delivered_s += [now - dropped.entry.arrived_at for dropped in queue.expire(now)]
    return queue.pop(now)
