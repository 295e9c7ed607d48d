"""What delivering a batch's answers takes a row, and what the queue makes of it."""

import pytest

from penstock.gateway.batching.service_times import DELIVERY_BATCHES, MIN_DELIVERIES, DeliveryTimes
from penstock.protocol.errors import Overloaded
from penstock.protocol.inference import CloseReason
from tests.batching.driving import ALPHA_S, BETA_S, Bench, call_s


def after(*seen: tuple[int, float]) -> float:
    """What is believed after those batches: (rows, seconds)."""
    deliveries = DeliveryTimes()
    for rows, seconds in seen:
        deliveries.learn(rows, seconds)
    return deliveries.row_s


@pytest.mark.parametrize(
    ("seen", "row_s"),
    [
        ([(10, 0.5)] * (MIN_DELIVERIES - 1), 0.0),
        ([(10, 0.5)] * MIN_DELIVERIES, 0.05),
        ([(100, 0.02), (100, 0.02), (100, 1.0)] * 5, 0.0002),
        ([(1, 0.002), (1, 0.002), (1, 0.002), (64, 0.0128)] * 4, 0.0002),
        ([(8, 0.008)] * 50 + [(8, 0.0008)] * DELIVERY_BATCHES, 0.0001),
        ([(8, 0.0008)] * 50 + [(8, 0.008)] * DELIVERY_BATCHES, 0.001),
    ],
    ids=["too few", "enough", "one outlier in three", "small batches", "cheaper", "dearer"],
)
def test_time_a_row_is_the_median_of_the_last_batches(seen: list[tuple[int, float]], row_s: float) -> None:
    """Neither a machine that stood still, nor batches of one row, move it; a change is believed soon."""
    assert after(*seen) == pytest.approx(row_s)


def taught_to_deliver(row_s: float) -> Bench:
    """Twenty calls of all sizes, each row of which took so long to deliver after its call."""
    bench = Bench()
    for rows in [*range(1, 11)] * 2:
        bench.push(rows)
        batch = bench.pop()
        bench.done(batch, call_s(rows))
        bench.queue.delivered(batch, row_s * rows)
    bench.after(0.05)
    return bench


def test_batch_is_small_enough_for_its_answers_to_be_delivered_in_time() -> None:
    """What delivering took counts for each row against the earliest deadline, the engine's own time being the same."""
    delivered_s, within_s = 0.0003, 0.010
    bench = taught_to_deliver(delivered_s)
    bench.push(64, within_s=within_s)

    batch = bench.pop()

    assert batch.rows == int((within_s - ALPHA_S) / (BETA_S + delivered_s) + 1e-6) == 20
    assert batch.close_reason is CloseReason.DEADLINE
    assert batch.expected_s == pytest.approx(call_s(batch.rows))  # the engine's next call waits for no delivery


def test_request_whose_answer_could_not_be_delivered_in_time_is_refused_at_once() -> None:
    """The engine alone would be quick enough."""
    bench = taught_to_deliver(0.001)
    bench.push(8, within_s=1.0)
    bench.pop()

    with pytest.raises(Overloaded):
        bench.queue.push(bench.entry(within_s=call_s(8) + call_s(1) + 0.0005), bench.now)
    bench.push(1, within_s=call_s(8) + call_s(1) + 0.0015)


def test_waiting_request_whose_answer_could_no_longer_be_delivered_is_given_up() -> None:
    """As soon as that is so, and not before."""
    bench = taught_to_deliver(0.001)
    bench.push(8, within_s=1.0)
    bench.pop()
    (entry,) = bench.push(1, within_s=call_s(8) + call_s(1) + 0.0013)
    bench.after(call_s(8) + 0.0001)  # the call is late, and will be as late again
    assert bench.expire() == []

    bench.after(0.0001)

    assert [dropped.entry for dropped in bench.expire()] == [entry]
