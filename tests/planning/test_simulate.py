"""The replay itself: by hand, to the microsecond; and what it says of a policy that breaks its word."""

from collections.abc import Sequence

import pytest

from server.batching.entry import Batch, Entry
from server.core.errors import InvalidRequest, Overloaded
from server.planning.arrivals import Arrivals, poisson
from server.planning.engine import OUTLIER_TIMES, Engine, EngineModel, Slowdown
from server.planning.policy import Lost
from server.planning.profile import V100, line
from server.planning.rivals import Fifo, Nexus, Triton
from server.planning.simulate import Outcome, PolicyFault, simulate

PLAIN = line("plain", alpha_s=1.0, beta_s=0.5, max_batch_size=4)


def replay(policy: Fifo, *times: float, slo_s: float = 4.0, **engine: float) -> Outcome:
    """Every arrival counts."""
    model = EngineModel(PLAIN, **engine)  # type: ignore[arg-type]
    return simulate(policy, model, Arrivals(times), slo_s=slo_s, warm_up=0.0)


def test_calls_take_what_the_profile_says_and_batches_form_behind_them() -> None:
    """One goes at once (1.5 s); the two that come meanwhile go together when it ends (2 s)."""
    outcome = replay(Fifo(4), 0.0, 0.5, 1.0)
    assert outcome.latencies_s == pytest.approx([1.5, 3.0, 2.5])
    assert dict(outcome.batch_rows) == {1: 1, 2: 1}
    assert (outcome.within_slo, outcome.late, outcome.busy_s, outcome.ended_at) == (3, 0, 3.5, 3.5)


def test_an_answer_after_its_deadline_is_late_and_one_at_it_is_not() -> None:
    """Two seconds and a half behind a call that another one started; an SLO of exactly that, and of less."""
    assert replay(Fifo(4), 0.0, 0.5, slo_s=2.5).late == 0
    assert replay(Fifo(4), 0.0, 0.5, slo_s=2.4).late == 1


def test_two_instances_run_at_once_and_a_third_call_waits_at_the_door() -> None:
    """Three slots before two instances: the third begins when the first ends."""
    outcome = replay(Fifo(1, slots=3), 0.0, 0.0, 0.0, instances=2)
    assert outcome.latencies_s == pytest.approx([1.5, 1.5, 3.0])


def test_the_way_to_the_engine_is_free_while_another_call_runs() -> None:
    """One slot pays the way there and back for each call, a second slot pays it once."""
    assert replay(Fifo(1), 0.0, 0.0, before_s=0.2, after_s=0.1).ended_at == pytest.approx(3.6)
    assert replay(Fifo(1, slots=2), 0.0, 0.0, before_s=0.2, after_s=0.1).ended_at == pytest.approx(3.3)


def test_what_is_refused_expired_and_answered_adds_up_to_what_was_offered() -> None:
    """Each request has one fate, warm-up apart; goodput and share speak of those that were measured."""
    outcome = simulate(
        Triton(8, max_queue_size=20, patience_s=0.004), EngineModel(V100), poisson(4000.0, 5000, 3), slo_s=0.007
    )
    fates = (outcome.within_slo, outcome.late, outcome.refused, outcome.expired)
    assert outcome.offered == sum(fates) == 4750
    assert min(fates) > 0
    assert outcome.share == outcome.within_slo / 4750
    assert 1000 < outcome.goodput < 4000
    assert outcome.by_client == {"": [4750, outcome.within_slo]}


def test_slow_spells_outliers_and_noise_change_what_a_call_takes() -> None:
    """Ten times as long while it is slow; every call an outlier; noise that is the same for its seed."""
    slow = Engine(EngineModel(PLAIN, slowdowns=(Slowdown(2.0, 10.0, until_s=5.0),)))
    assert [slow.start(1, at) - at for at in (0.0, 2.0, 20.0)] == pytest.approx([1.5, 15.0, 1.5])
    assert Engine(EngineModel(PLAIN, outlier_every=1)).start(1, 0.0) == pytest.approx(1.5 * OUTLIER_TIMES)
    noisy = [Engine(EngineModel(PLAIN, noise=0.2, seed=seed)).start(1, 0.0) for seed in (1, 1, 2)]
    assert noisy[0] == noisy[1] != noisy[2]


def test_a_run_that_lost_too_many_is_cut_short() -> None:
    """A search for a rate need not see the rest."""
    outcome = simulate(Triton(1), EngineModel(V100), poisson(4000.0, 5000, 3), slo_s=0.007, lost_at_most=50)
    assert outcome.is_cut_short
    assert outcome.late == pytest.approx(50, abs=2)


class _Forgetful(Fifo):
    def pop(self, now: float) -> Batch | None:
        return None


class _Restless(Fifo):
    def pop(self, now: float) -> Batch | None:
        return None

    def next_wakeup(self, now: float) -> float | None:
        return now


class _Rude(Fifo):
    def push(self, entry: Entry, now: float) -> Sequence[Lost]:
        raise InvalidRequest("no")


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [(_Forgetful, "1 requests wait"), (_Restless, "woken 1000 times"), (_Rude, "InvalidRequest")],
)
def test_a_policy_that_loses_or_spins_or_lies_is_told_so(policy: type[Fifo], sentence: str) -> None:
    """Requests that nobody answers, a clock that stands still, an error that is no refusal: a fault, not a result."""
    with pytest.raises(PolicyFault, match=sentence):
        replay(policy(4), 0.0)


def test_triton_waits_for_its_delay_or_its_preferred_batch() -> None:
    """Two of a preferred size go when the second comes; the odd one goes when its delay has passed."""
    outcome = replay(Triton(4, delay_s=0.6, preferred=(2,)), 0.0, 0.25, 10.0, slo_s=9.0)
    assert outcome.latencies_s == pytest.approx([2.25, 2.0, 2.1])


def test_triton_gives_up_what_waited_for_longer_than_its_timeout() -> None:
    """The one behind a call of 1.5 s has a timeout of 1 s."""
    outcome = replay(Triton(1, patience_s=1.0), 0.0, 0.1)
    assert (outcome.within_slo, outcome.expired) == (1, 1)


def test_nexus_drops_the_head_that_would_force_a_small_batch() -> None:
    """When the engine is free at 1.5 s, the head has time for one row, not for the window of three."""
    outcome = replay(Nexus(4, seconds=PLAIN.seconds, window=3), 0.0, 0.1, 1.2, 1.3, 1.4, slo_s=3.0)
    assert (outcome.refused, dict(outcome.batch_rows)) == (1, {1: 1, 3: 1})
    with pytest.raises(Overloaded, match="1 requests wait"):
        _push_two(Nexus(4, max_queue_size=1, seconds=PLAIN.seconds))


def _push_two(policy: Fifo) -> None:
    for _ in range(2):
        policy.push(Entry("key", 1, 1, 0.0), 0.0)
