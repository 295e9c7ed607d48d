"""Simulated arrivals, engines and policies."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

import pytest

from penstock.gateway.batching.entries import Batch, Entry
from penstock.gateway.batching.queue import Dropped
from penstock.planning.policies import FifoPolicy, NexusPolicy, TritonPolicy
from penstock.planning.profile import V100, linear_profile
from penstock.planning.simulation import (
    FRAMES_PER_S,
    JITTER_S,
    PATTERNS,
    Arrivals,
    EngineModel,
    PolicyFault,
    SimulationResult,
    periodic,
    poisson,
    simulate,
)
from penstock.protocol.errors import InvalidRequest, Overloaded

COUNT, RATE = 20_000, 1500.0


def spread(times: tuple[float, ...], window_s: float = 0.02) -> float:
    """Variance over mean of the number of arrivals in a window: 1 for Poisson."""
    counts = [0] * (int(times[-1] / window_s) + 1)
    for at in times:
        counts[int(at / window_s)] += 1
    return statistics.variance(counts[:-1]) / statistics.fmean(counts[:-1])


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_keeps_its_rate_and_its_seed(name: str) -> None:
    """As many as asked, in order, from 0 on, at about the rate; the same again for the seed, others for another."""
    arrivals = PATTERNS[name](RATE, COUNT, 7)
    times = arrivals.times
    assert len(arrivals) == COUNT
    assert times[0] >= 0.0
    assert all(before <= after for before, after in pairwise(times))
    assert COUNT / times[-1] == pytest.approx(RATE, rel=0.15)
    assert PATTERNS[name](RATE, COUNT, 7) == arrivals
    assert PATTERNS[name](RATE, COUNT, 8) != arrivals
    assert len(arrivals.clients) in (0, COUNT)


def test_bursts_are_burstier_than_poisson_and_cameras_are_calmer() -> None:
    """By the variance of the number of arrivals in 20 ms over its mean, which is 1 for Poisson."""
    calm, even, wild = (spread(PATTERNS[name](RATE, COUNT, 3).times) for name in ("periodic", "poisson", "bursty"))
    assert calm < 0.8 < even < 1.2 < 3.0 < wild
    assert spread(PATTERNS["on-off"](RATE, COUNT, 3).times) > 2.0


def test_a_camera_sends_30_frames_a_second_with_jitter() -> None:
    """rate / 30 cameras; the gaps of one are 33 ms in the mean and vary by its jitter."""
    arrivals = periodic(1500.0, 5000, 1)
    assert len(set(arrivals.clients)) == 50
    own = [at for at, client in zip(arrivals.times, arrivals.clients, strict=True) if client == "camera 0"]
    gaps = [after - before for before, after in pairwise(own)]
    assert statistics.fmean(gaps) == pytest.approx(1 / FRAMES_PER_S, rel=0.01)
    assert statistics.stdev(gaps) == pytest.approx(2**0.5 * JITTER_S, rel=0.4)


PLAIN = linear_profile("plain", alpha_s=1.0, beta_s=0.5, max_batch_size=4)


def replay(policy: FifoPolicy, *times: float, slo_s: float = 4.0, **engine: float) -> SimulationResult:
    """Every arrival counts."""
    model = EngineModel(PLAIN, **engine)  # type: ignore[arg-type]
    return simulate(policy, model, Arrivals(times), slo_s=slo_s, warm_up=0.0)


def test_calls_take_what_the_profile_says_and_batches_form_behind_them() -> None:
    """One goes at once (1.5 s); the two that come meanwhile go together when it ends (2 s)."""
    outcome = replay(FifoPolicy(4), 0.0, 0.5, 1.0)
    assert outcome.latencies_s == pytest.approx([1.5, 3.0, 2.5])
    assert dict(outcome.batch_rows) == {1: 1, 2: 1}
    assert (outcome.within_slo, outcome.late, outcome.busy_s, outcome.ended_at) == (3, 0, 3.5, 3.5)


def test_an_answer_after_its_deadline_is_late_and_one_at_it_is_not() -> None:
    """Two seconds and a half behind a call that another one started; an SLO of exactly that, and of less."""
    assert replay(FifoPolicy(4), 0.0, 0.5, slo_s=2.5).late == 0
    assert replay(FifoPolicy(4), 0.0, 0.5, slo_s=2.4).late == 1


def test_two_instances_run_at_once_and_a_third_call_waits_at_the_door() -> None:
    """Three slots before two instances: the third begins when the first ends."""
    outcome = replay(FifoPolicy(1, slots=3), 0.0, 0.0, 0.0, instances=2)
    assert outcome.latencies_s == pytest.approx([1.5, 1.5, 3.0])


def test_the_way_to_the_engine_is_free_while_another_call_runs() -> None:
    """One slot pays the way there and back for each call, a second slot pays it once."""
    assert replay(FifoPolicy(1), 0.0, 0.0, before_s=0.2, after_s=0.1).ended_at == pytest.approx(3.6)
    assert replay(FifoPolicy(1, slots=2), 0.0, 0.0, before_s=0.2, after_s=0.1).ended_at == pytest.approx(3.3)


def test_what_is_refused_expired_and_answered_adds_up_to_what_was_offered() -> None:
    """Each request has one fate, warm-up apart; goodput and share speak of those that were measured."""
    outcome = simulate(
        TritonPolicy(8, max_queue_size=20, max_wait_s=0.004), EngineModel(V100), poisson(4000.0, 5000, 3), slo_s=0.007
    )
    fates = (outcome.within_slo, outcome.late, outcome.refused, outcome.expired)
    assert outcome.offered == sum(fates) == 4750
    assert min(fates) > 0
    assert outcome.share == outcome.within_slo / 4750
    assert 1000 < outcome.goodput < 4000
    assert outcome.by_client == {"": [4750, outcome.within_slo]}


def test_a_run_that_lost_too_many_is_cut_short() -> None:
    """A search for a rate need not see the rest."""
    outcome = simulate(TritonPolicy(1), EngineModel(V100), poisson(4000.0, 5000, 3), slo_s=0.007, lost_at_most=50)
    assert outcome.is_cut_short
    assert outcome.late == pytest.approx(50, abs=2)


class _Forgetful(FifoPolicy):
    def pop(self, now: float) -> Batch | None:
        return None


class _Restless(FifoPolicy):
    def pop(self, now: float) -> Batch | None:
        return None

    def next_wakeup(self, now: float) -> float | None:
        return now


class _Rude(FifoPolicy):
    def push(self, entry: Entry, now: float) -> Sequence[Dropped]:
        raise InvalidRequest("no")


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [(_Forgetful, "1 requests wait"), (_Restless, "woken 1000 times"), (_Rude, "InvalidRequest")],
)
def test_a_policy_that_loses_or_spins_or_lies_is_reported(policy: type[FifoPolicy], sentence: str) -> None:
    """Requests without an answer, a clock that stands still, an error that is no refusal: a fault, not a result."""
    with pytest.raises(PolicyFault, match=sentence):
        replay(policy(4), 0.0)


def test_triton_waits_for_its_delay_or_its_preferred_batch() -> None:
    """Two of a preferred size go when the second comes; the odd one goes when its delay has passed."""
    outcome = replay(TritonPolicy(4, delay_s=0.6, preferred=(2,)), 0.0, 0.25, 10.0, slo_s=9.0)
    assert outcome.latencies_s == pytest.approx([2.25, 2.0, 2.1])


def test_triton_gives_up_what_waited_for_longer_than_its_timeout() -> None:
    """The one behind a call of 1.5 s has a timeout of 1 s."""
    outcome = replay(TritonPolicy(1, max_wait_s=1.0), 0.0, 0.1)
    assert (outcome.within_slo, outcome.expired) == (1, 1)


def test_nexus_drops_the_head_that_would_force_a_small_batch() -> None:
    """When the engine is free at 1.5 s, the head has time for one row, not for the window of three."""
    outcome = replay(NexusPolicy(4, seconds=PLAIN.seconds, window=3), 0.0, 0.1, 1.2, 1.3, 1.4, slo_s=3.0)
    assert (outcome.refused, dict(outcome.batch_rows)) == (1, {1: 1, 3: 1})
    with pytest.raises(Overloaded, match="1 requests wait"):
        _push_two(NexusPolicy(4, max_queue_size=1, seconds=PLAIN.seconds))


def _push_two(policy: FifoPolicy) -> None:
    for _ in range(2):
        policy.push(Entry("key", 1, 1, 0.0), 0.0)
