"""Which word a batch says of why it took no more rows, where it waited for more."""

from penstock.protocol.inference import CloseReason
from tests.batching.driving import Bench

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
