"""The queue of one model: every promise of its batches, under a manual clock."""

import pytest

from penstock.gateway.batching.entries import Entry, Stage
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import BatchQueue
from penstock.planning.profile import linear_profile
from penstock.planning.simulation import EngineModel, poisson, simulate
from penstock.protocol.errors import DeadlineExceeded, Overloaded
from penstock.protocol.inference import CloseReason
from tests.batching.driving import ALPHA_S, BETA_S, Bench, call_s


def test_pop_while_idle_sends_what_waits_at_once() -> None:
    """An idle engine gets what there is, without waiting for more."""
    bench = Bench()
    (entry,) = bench.push()

    batch = bench.pop()

    assert batch.entries == (entry,)
    assert batch.close_reason is CloseReason.SLOT_FREE
    assert (batch.busy, entry.ahead) == (0, 0)


def test_pop_while_engine_runs_lets_the_batch_grow() -> None:
    """What comes while a call runs goes together when it ends."""
    bench = Bench()
    bench.push()
    first = bench.pop()
    later = bench.push(5)

    assert bench.queue.pop(bench.now) is None
    bench.done(first)

    assert set(bench.pop().entries) == set(later)


def test_pop_serves_priority_then_deadline() -> None:
    """Priority 0 goes first; inside a priority the earliest deadline does; without a deadline it is who came first."""
    bench = Bench(max_batch_size=1)
    (late,) = bench.push(within_s=9.0)
    (soon,) = bench.push(within_s=5.0)
    (low,) = bench.push(within_s=1.0, priority=1)
    order: list[Entry] = []
    for _ in range(3):
        batch = bench.pop()
        order += batch.entries
        bench.done(batch)

    assert order == [soon, late, low]


def test_pop_never_mixes_keys() -> None:
    """Another key ends the batch with the reason said; without a key an entry goes alone."""
    bench = Bench()
    a = bench.push(2, key="a")
    b = bench.push(1, key="b")
    alone = bench.push(2, key=None)
    formed = []
    for _ in range(4):
        formed.append(bench.pop())
        bench.done(formed[-1])

    assert [batch.entries for batch in formed] == [tuple(a), tuple(b), (alone[0],), (alone[1],)]
    assert formed[0].close_reason is CloseReason.INCOMPATIBLE


def test_pop_full_batch_says_so() -> None:
    """A batch holds max_batch_size rows at most; the rest stays in its order."""
    bench = Bench(max_batch_size=8)
    bench.teach()
    entries = bench.push(11)

    batch = bench.pop()

    assert batch.entries == tuple(entries[:8])
    assert batch.close_reason is CloseReason.FULL


def test_pop_batch_ends_before_its_earliest_deadline() -> None:
    """No batch is made so large that its first member misses its deadline by what is known of the engine."""
    bench = Bench()
    bench.teach()
    urgent = bench.push(within_s=call_s(3) + 1e-6)
    bench.push(9, within_s=1.0)

    batch = bench.pop()

    assert batch.rows == 3
    assert urgent[0] in batch.entries
    assert batch.close_reason is CloseReason.DEADLINE
    assert batch.expected_s == pytest.approx(call_s(3), rel=1e-3)


def test_pop_late_entry_is_given_up_for_many() -> None:
    """Where all are pressed, one whose deadline would make the batch small is refused, and the others are served."""
    bench = Bench()
    bench.teach()
    bench.push()
    running = bench.pop()
    (late,) = bench.push(within_s=call_s(1) + call_s(2) + 1e-6)
    bench.after(0.001)
    others = bench.push(30, within_s=0.0065)
    bench.done(running, call_s(1) - 0.001)

    batch = bench.pop()
    lost = bench.expire()

    assert batch.entries == tuple(others)
    assert [one.entry for one in lost] == [late]
    assert isinstance(lost[0].error, Overloaded)
    assert lost[0].error.reason == "cannot_meet"


def test_push_deadline_passed_is_refused() -> None:
    """A deadline of now or before is answered with 504 and touches nothing."""
    bench = Bench()
    for within_s in (0.0, -1.0, -1e9):
        with pytest.raises(DeadlineExceeded):
            bench.queue.push(bench.entry(within_s=within_s), bench.now)

    assert bench.queue.statistics().depth == 0


def test_push_deadline_that_cannot_be_met_says_the_wait() -> None:
    """A request that the running call leaves no time for is refused at the door, with the predicted time."""
    bench = Bench()
    bench.teach()
    bench.push(16)
    bench.pop()

    with pytest.raises(Overloaded, match=r"5\.7 ms at the soonest and 4\.0 ms are left") as refused:
        bench.queue.push(bench.entry(within_s=0.004), bench.now)

    assert refused.value.reason == "cannot_meet"


def test_push_to_idle_engine_is_tried_whatever_was_learned() -> None:
    """A fit that says that nothing can be met is tried again, so that an engine that recovered is found out."""
    bench = Bench()
    bench.teach(takes=lambda rows: 1.0 + rows * 0.01)
    bench.after(0.3)

    bench.push(within_s=0.1)

    assert bench.expire() == []
    assert bench.pop().rows == 1


def test_expire_deadline_passes_while_all_slots_are_busy() -> None:
    """One that waited too long gets DeadlineExceeded, and the rest keep their places."""
    bench = Bench()
    bench.push()
    bench.pop()
    (short,) = bench.push(within_s=0.01)
    (long,) = bench.push(within_s=9.0)
    wakeup_at = bench.queue.next_wakeup(bench.now)
    assert wakeup_at == pytest.approx(bench.now + 0.01, abs=1e-4)
    bench.now = wakeup_at or 0.0

    lost = bench.expire()

    assert [one.entry for one in lost] == [short]
    assert isinstance(lost[0].error, DeadlineExceeded)
    assert (short.stage, long.stage) == (Stage.GONE, Stage.QUEUE)


def test_expire_hopeless_entry_is_refused_before_its_deadline() -> None:
    """The error comes as soon as the engine cannot answer in time any more."""
    bench = Bench()
    bench.teach()
    bench.push()
    bench.pop()
    (entry,) = bench.push(within_s=call_s(1) * 2 + 0.001)
    bench.after(call_s(1) + 0.0011)  # the running call should be through by now

    (lost,) = bench.expire()

    assert lost.entry is entry
    assert isinstance(lost.error, Overloaded)


def test_cancel_in_queue_leaves_no_trace() -> None:
    """One that left is in no batch, and its place is another's at once."""
    bench = Bench(max_queue_size=2)
    bench.push()
    running = bench.pop()
    left, stayed = bench.push(2)

    assert bench.queue.cancel(left, bench.now) is Stage.QUEUE
    (third,) = bench.push()
    bench.done(running)
    bench.done(bench.pop())

    assert left.stage is Stage.GONE
    assert {stayed.stage, third.stage} <= {Stage.GONE, Stage.QUEUE}
    assert bench.queue.cancel(left, bench.now) is Stage.GONE


@pytest.mark.parametrize("how", ["done", "failed", "released"])
def test_end_of_a_call_frees_its_slot(how: str) -> None:
    """Answered, failed or given up: the next batch can go, and a second word about the first changes nothing."""
    bench = Bench(max_batch_size=1)
    bench.push(3)
    batch = bench.pop()
    assert bench.queue.pop(bench.now) is None

    getattr(bench.queue, how)(batch, bench.now + 0.001)
    bench.queue.released(batch, bench.now + 0.001)
    bench.after(0.001)

    assert bench.pop().number == batch.number + 1
    assert bench.queue.pop(bench.now) is None


def test_failed_out_of_memory_halves_batches_which_grow_back() -> None:
    """Half of what did not fit, and from there one row more with each full batch."""
    bench = Bench(max_batch_size=16)
    bench.teach()
    bench.push(200)
    batch = bench.pop()
    bench.queue.failed(batch, bench.now, out_of_memory=True)
    sizes = []
    for _ in range(9):
        batch = bench.pop()
        sizes.append(batch.rows)
        bench.done(batch)

    assert sizes == [8, 9, 10, 11, 12, 13, 14, 15, 16]


def test_push_full_queue_refuses_with_the_limit() -> None:
    """Requests and bytes are bounded, and the message says by what."""
    for bench, reason, words in (
        (Bench(max_queue_size=3), "queue_full", "3 requests (limit 3)"),
        (Bench(max_queue_bytes=24), "queue_bytes", "24 bytes (limit 24)"),
    ):
        bench.push(3)
        with pytest.raises(Overloaded) as refused:
            bench.queue.push(bench.entry(), bench.now)
        assert refused.value.reason == reason
        assert words in refused.value.message


def test_push_full_queue_displaces_the_latest_of_who_has_most() -> None:
    """A client with less gets a place from the client with most, down to equal shares."""
    bench = Bench(max_queue_size=4)
    flood = bench.push(4, client="flood")
    displaced = []
    for _ in range(2):
        displaced += bench.queue.push(bench.entry(client="other"), bench.now)

    assert [one.entry for one in displaced] == [flood[3], flood[2]]
    assert {one.error.reason for one in displaced} == {"share"}
    with pytest.raises(Overloaded):
        bench.queue.push(bench.entry(client="other"), bench.now)


def test_flood_without_deadlines_does_not_delay_others() -> None:
    """Where one client asks for far more, another's request is in the very next batch."""
    bench = Bench(max_batch_size=8)
    bench.teach(client="flood")
    bench.push(100, client="flood")
    running = bench.pop()
    (other,) = bench.push(client="other")
    bench.done(running)

    assert other in bench.pop().entries


def test_engine_behind_a_long_way_is_never_idle_under_load() -> None:
    """Where the way to the engine takes time, the next batch waits at its door; it is learned how early to send it."""
    profile = linear_profile("p", alpha_s=ALPHA_S, beta_s=BETA_S, max_batch_size=8)
    queue = BatchQueue("m", BatchOptions(max_batch_size=8))
    engine = EngineModel(profile, before_s=0.0003, after_s=0.0003)

    outcome = simulate(queue, engine, poisson(4000.0, 12000, 1), slo_s=0.05)

    assert outcome.busy_s / outcome.ended_at > 0.96  # 0.82 if each batch were sent when the one before had come back


def test_close_gives_back_all_that_waits() -> None:
    """At the drain's end every waiting request fails, in the order of arrival."""
    bench = Bench()
    bench.push()
    bench.pop()
    entries = bench.push(3)

    lost = bench.queue.close(bench.now)

    assert [one.entry for one in lost] == entries
    assert {one.error.reason for one in lost} == {"draining"}
    assert bench.queue.statistics().depth == 0


def test_statistics_tell_what_happened() -> None:
    """Depth, calls, sizes, reasons and drops are counted."""
    bench = Bench(max_queue_size=2)
    bench.push()
    bench.pop()
    bench.push(2)
    with pytest.raises(Overloaded):
        bench.queue.push(bench.entry(), bench.now)

    statistics = bench.queue.statistics()

    assert (statistics.depth, statistics.rows, statistics.size_bytes, statistics.in_flight) == (2, 2, 16, 1)
    assert statistics.batches_by_rows == {1: 1}
    assert statistics.closed_by == {CloseReason.SLOT_FREE: 1}
    assert statistics.dropped == {"queue_full": 1}


def test_push_refused_after_displacing_tells_the_displaced() -> None:
    """An entry that is displaced for a request that is then refused by its bytes gets its error all the same."""
    bench = Bench(max_queue_size=3, max_queue_bytes=48)
    *_, latest = bench.push(3, client="flood")
    large = bench.entry(rows=1, client="other")
    large.size_bytes = 1000

    with pytest.raises(Overloaded):
        bench.queue.push(large, bench.now)

    assert bench.queue.next_wakeup(bench.now) == bench.now
    assert latest in [one.entry for one in bench.expire()]


def test_long_deadline_waits_no_longer_than_none() -> None:
    """Who gives half a minute is not served after everybody who gives no time at all."""
    bench = Bench(max_batch_size=1)
    (patient,) = bench.push(within_s=30.0, client="patient")
    bench.push(4, client="many")
    served = []
    for _ in range(200):
        batch = bench.pop()
        served += batch.entries
        bench.done(batch, 0.05)
        bench.push(client="many")

    assert patient in served[:30]


def test_hopeless_request_is_refused_before_it_is_made_by_all_that_is_ahead() -> None:
    """Rows that wait and rows that are still being made count; the error says when it would be answered."""
    bench = Bench(max_batch_size=10)
    bench.teach()
    bench.push(20)
    needed_s = 3 * ALPHA_S + 30 * BETA_S
    bench.queue.refuse_hopeless(10, bench.now + needed_s * 1.5, bench.now)
    with pytest.raises(Overloaded, match="would answer in"):
        bench.queue.refuse_hopeless(10, bench.now + needed_s * 0.8, bench.now)
    assert bench.queue.statistics().dropped == {"cannot_meet": 1}


def test_nothing_is_refused_beforehand_while_it_is_not_known_what_calls_take() -> None:
    """The first requests go through, whatever their deadline."""
    bench = Bench()
    bench.push(20)
    bench.queue.refuse_hopeless(1, bench.now + 1e-6, bench.now)
