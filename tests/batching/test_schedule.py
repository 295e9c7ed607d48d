"""When a batch waits for more although the engine could take it: only where that is asked for, or pays."""

import heapq
import random
import statistics

import pytest

from penstock.gateway.batching.entries import Entry
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import BatchQueue
from penstock.planning.profile import V100, linear_profile
from penstock.planning.simulation import EngineModel, poisson, simulate
from penstock.protocol.inference import CloseReason
from tests.batching.driving import Bench, call_s


def closed_loop(callers: int, *, call_s: float, row_s: float, think_s: float, until_s: float = 4.0) -> list[int]:
    """Rows of each batch where callers ask again a moment after their answer, half or one and a half times think_s."""
    queue, chance = BatchQueue("m", BatchOptions(max_batch_size=8)), random.Random(5)
    events: list[tuple[float, int, object]] = [(chance.random() * think_s, caller, None) for caller in range(callers)]
    heapq.heapify(events)
    free_at, rows, serial = 0.0, [], callers
    while events[0][0] < until_s:
        now, number, batch = heapq.heappop(events)
        if batch is not None:
            queue.done(batch, now)  # type: ignore[arg-type]
            for _ in batch.entries:  # type: ignore[attr-defined]
                serial += 1
                heapq.heappush(events, (now + think_s * (0.5 + chance.random()), serial, None))
        elif number:
            queue.push(Entry("k", 1, 8, now), now)
        while (formed := queue.pop(now)) is not None:
            free_at = max(now, free_at) + call_s + row_s * formed.rows
            rows.append(formed.rows)
            serial += 1
            heapq.heappush(events, (free_at, serial, formed))
        wakeup_at = queue.next_wakeup(now)
        if wakeup_at is not None:
            heapq.heappush(events, (max(wakeup_at, now), 0, None))
    return rows


def test_callers_that_come_back_at_once_are_served_together() -> None:
    """Nine callers in turns, of whom eight fit a batch: not two groups that the engine serves one after the other."""
    rows = closed_loop(9, call_s=0.012, row_s=0.002, think_s=0.001)

    assert sum(rows[-40:]) / 40 > 7


def test_callers_that_take_their_time_are_not_waited_for() -> None:
    """Waiting for those who come later than a call takes would cost more than it saves: no slot is left empty."""
    bench = Bench()
    bench.teach()
    for _ in range(20):
        bench.push(2)
        batch = bench.pop()
        bench.done(batch)
        bench.after(call_s(1) * 3)

    bench.push(2)

    assert bench.pop().rows == 2


@pytest.mark.parametrize(("within_s", "waits_s"), [(None, 0.05), (1.0, 0.05), (0.02, 0.02 - call_s(3))])
def test_max_queue_delay_waits_for_more_but_not_into_a_deadline(within_s: float | None, waits_s: float) -> None:
    """The first one waits so long while a slot is free, and no longer than its deadline allows."""
    bench = Bench(max_queue_delay_s=0.05)
    bench.teach()
    bench.push(2, within_s=within_s)

    assert bench.queue.pop(bench.now) is None
    assert bench.queue.next_wakeup(bench.now) == pytest.approx(bench.now + waits_s, abs=1e-4)
    bench.after(waits_s)
    assert bench.pop().rows == 2


def test_max_queue_delay_ends_when_the_batch_is_full() -> None:
    """As many as fit are not kept waiting."""
    bench = Bench(max_batch_size=4, max_queue_delay_s=0.05)
    bench.push(4)

    assert bench.pop().rows == 4


def test_instances_share_the_load_evenly() -> None:
    """Two instances answer nearly twice what one does: neither gets large batches while the other has the leavings."""
    queue = BatchQueue("m", BatchOptions(max_batch_size=512, instances=2, slo_s=0.015, max_queue_size=4096))

    outcome = simulate(queue, EngineModel(V100, instances=2), poisson(9700.0, 12000, 4), slo_s=0.015, warm_up=0.2)

    assert outcome.share >= 0.99


def test_a_queue_that_has_grown_goes_out_in_as_many_parts_as_there_are_instances() -> None:
    """However little comes usually: small batches would leave a gateway that is behind no time to catch up."""
    bench = Bench(instances=4)
    bench.teach(takes=lambda rows: 0.004 + 0.0002 * rows)

    bench.push(200)

    assert [bench.pop().rows for _ in range(2)] == [50, 38]


@pytest.mark.parametrize(("alpha_s", "beta_s", "expected"), [(0.0003, 0.015, 3), (0.03, 0.00001, 6)])
def test_one_of_two_busy_instances_takes_all_rows_only_if_that_saves_time(
    alpha_s: float, beta_s: float, expected: int
) -> None:
    """At full load, rows that save nothing by sharing a call are left for the other instance."""
    bench = Bench(max_batch_size=8, instances=2)
    bench.teach(takes=lambda rows: alpha_s + beta_s * rows)
    for _ in range(200):
        bench.push(16 - bench.queue.statistics().rows)
        batches = sorted((bench.pop(), bench.pop()), key=lambda batch: batch.rows)
        begin = bench.now
        for batch in batches:
            bench.now = begin + alpha_s + beta_s * batch.rows
            bench.queue.done(batch, bench.now)
    while bench.queue.statistics().rows:
        batch = bench.pop()
        bench.done(batch, alpha_s + beta_s * batch.rows)

    bench.push(6)

    assert bench.pop().rows == expected


@pytest.mark.parametrize("rate", [6000.0, 9000.0])
def test_no_queue_stands_before_instances_that_are_idle(rate: float) -> None:
    """What waits is what comes between two batches, not what once had waited: these instances could do 20,000/s."""
    engine = EngineModel(linear_profile("four", alpha_s=0.0021, beta_s=0.00016, max_batch_size=64), instances=4)
    queue = BatchQueue("m", BatchOptions(max_batch_size=64, instances=4))

    outcome = simulate(queue, engine, poisson(rate, int(rate), 4), slo_s=1e6)

    assert statistics.median(outcome.latencies_s) < 0.0055


@pytest.mark.parametrize(("alpha_s", "is_sent"), [(0.002, True), (0.030, False)])
def test_rows_that_save_little_by_sharing_a_call_wait_for_none(alpha_s: float, is_sent: bool) -> None:
    """Where nearly all of a call is its rows', a further one is sent while the engine works, so that it never waits."""
    bench = Bench()
    bench.teach(takes=lambda rows: alpha_s + 0.02 * rows)
    bench.push()
    bench.pop()
    bench.push()

    assert (bench.queue.pop(bench.now) is not None) is is_sent


def test_rows_with_near_deadlines_wait_although_they_save_little() -> None:
    """A batch that is formed late is worth more to them than an engine that never waits."""
    bench = Bench()
    bench.teach(takes=lambda rows: 0.002 + 0.02 * rows)
    bench.push(within_s=0.07)
    bench.pop()
    bench.push(within_s=0.07)

    assert bench.queue.pop(bench.now) is None


DELAY_S = 0.01


def test_batch_that_waited_for_its_delay_says_so() -> None:
    """An idle engine, and rows that were waited for until max_queue_delay_us had passed."""
    bench = Bench(max_queue_delay_s=DELAY_S)
    bench.push(3)
    assert bench.queue.pop(bench.now) is None
    bench.after(DELAY_S)
    assert bench.pop().close_reason is CloseReason.DELAY


def test_batch_that_waited_for_the_engine_does_not_blame_its_delay() -> None:
    """The delay passed while a call ran, well or not: the batch went when the engine was free."""
    bench = Bench(max_queue_delay_s=DELAY_S)
    for end in (bench.queue.done, bench.queue.failed):
        bench.push(1)
        bench.after(DELAY_S)
        running = bench.pop()
        bench.push(2)
        bench.after(2 * DELAY_S)
        assert bench.queue.pop(bench.now) is None
        end(running, bench.now)
        behind = bench.pop()
        assert behind.close_reason is CloseReason.SLOT_FREE
        bench.done(behind)


def test_batch_whose_delay_ended_after_the_engines_call_says_so() -> None:
    """The engine was free before that, and it was the delay that was waited for."""
    bench = Bench(max_queue_delay_s=DELAY_S)
    bench.push(1)
    bench.after(DELAY_S)
    running = bench.pop()
    bench.push(2)
    bench.done(running, took_s=DELAY_S / 2)
    assert bench.queue.pop(bench.now) is None
    bench.after(DELAY_S)
    assert bench.pop().close_reason is CloseReason.DELAY


def test_full_batch_says_that_it_is_full_although_it_waited() -> None:
    """The largest batch would have taken no more in any case."""
    bench = Bench(max_queue_delay_s=DELAY_S, max_batch_size=4)
    bench.push(3)
    bench.after(DELAY_S)
    bench.push(1)
    assert bench.pop().close_reason is CloseReason.FULL
