"""The open loop keeps its schedule whatever the answers do; the closed loop keeps its callers busy. In virtual time."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import pytest

from penstock_load.clients.client import Answer
from penstock_load.driver.loops import Asking, LoopAlarm, OpenLoop, RequestLane, TimerfdAlarm, mix, run_callers
from penstock_load.driver.protocol import DriverError
from penstock_load.results import Record, Side, Stages, Status
from penstock_load.scenario import Kind, RequestSpec
from tests.loadtest.virtual_time import VirtualTimeLoop, run_virtual

EPOCH_S = -100.0  # records count from here, the loop's clock from 0
OK = Answer(Status.OK, "200")


class FunctionClient:
    """A client that is a function."""

    def __init__(self, send: Callable[[int], Awaitable[Answer]]) -> None:
        self.send = send

    async def aclose(self) -> None:
        """Has nothing to close."""


def asking(loop: VirtualTimeLoop, send: Callable[[int], Awaitable[Answer]]) -> Asking:
    """Asks of one kind, on the loop's clock."""
    lanes = [RequestLane("image street", FunctionClient(send))]
    return Asking(1, "steady", Side.TARGET, lanes, [0], EPOCH_S, loop.time)


def keep(
    send: Callable[[int], Awaitable[Answer]],
    moments: list[float],
    *,
    max_in_flight: int = 10_000,
    on_loop: Callable[[VirtualTimeLoop], None] = lambda _: None,
) -> list[Record]:
    """The records of a schedule, by intended time, seen from the phase's begin; deadlines are 2 s."""

    async def main(loop: VirtualTimeLoop) -> list[Record]:
        on_loop(loop)
        asks = asking(loop, send)
        due: Iterator[tuple[int, float]] = enumerate(moments)
        await OpenLoop(asks, due, max_in_flight=max_in_flight, alarms=LoopAlarm).run(timeout_s=2)
        return sorted(asks.take(1 << 30), key=lambda record: (record.intended_s, record.done_s))

    return run_virtual(main)


def since_begin(times_s: Iterator[float]) -> list[float]:
    """Rounded to a nanosecond, so that they compare."""
    return [round(at_s + EPOCH_S, 9) for at_s in times_s]


def test_requests_go_at_their_moments_though_no_answer_comes() -> None:
    """Each is sent when it is due, while all before it still wait for their answers."""

    async def send(number: int) -> Answer:
        await asyncio.sleep(1 - number / 10)
        return OK

    records = keep(send, [0, 0.1, 0.1, 0.35])
    assert since_begin(r.intended_s for r in records) == [0, 0.1, 0.1, 0.35]
    assert since_begin(r.sent_s for r in records) == [0, 0.1, 0.1, 0.35]
    assert since_begin(r.done_s for r in records) == [1, 0.9, 1, 1.05]
    assert {(r.round, r.phase, r.side, r.request, r.status) for r in records} == {
        (1, "steady", Side.TARGET, "image street", Status.OK)
    }


def test_loop_that_did_not_run_sends_what_is_due_at_once_and_says_when_it_was_due() -> None:
    """After half a second without the processor, every request of it leaves in one go, late and not forgotten."""

    async def send(number: int) -> Answer:
        return OK

    def block(loop: VirtualTimeLoop) -> None:
        loop.call_at(0.2, loop.block, 0.5)

    records = keep(send, [i / 10 for i in range(10)], on_loop=block)
    assert since_begin(r.intended_s for r in records) == [i / 10 for i in range(10)]
    assert since_begin(r.sent_s for r in records) == [0, 0.1, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.8, 0.9]


def test_request_beyond_the_limit_in_flight_is_recorded_as_not_sent() -> None:
    """Nothing is skipped silently: with room for two that last half a second, the third of each has a record."""

    async def send(number: int) -> Answer:
        await asyncio.sleep(0.5)
        return OK

    records = keep(send, [0, 0, 0.1, 0.6, 0.7, 0.8], max_in_flight=2)
    assert [r.status.value for r in records] == ["ok", "ok", "not_sent", "ok", "ok", "not_sent"]
    assert records[2].error == "2 requests in flight (limit 2)"
    assert records[2].sent_s == records[2].done_s == records[2].intended_s


def test_client_that_forgets_its_deadline_ends_the_phase_with_a_sentence() -> None:
    """The wait for answers is bounded, whatever a client does."""

    async def send(number: int) -> Answer:
        await asyncio.sleep(3600)
        return OK

    with pytest.raises(DriverError, match="image street were still under way in phase 'steady' after their deadline"):
        keep(send, [0])


def test_client_that_raises_ends_the_phase() -> None:
    """A mistake in a client is not taken for an answer."""

    async def send(number: int) -> Answer:
        if number:
            raise ZeroDivisionError
        await asyncio.sleep(1)
        return OK

    with pytest.raises(ExceptionGroup) as caught:
        keep(send, [0, 0.1, 0.2])
    assert caught.group_contains(ZeroDivisionError)


def test_record_holds_what_the_answer_said() -> None:
    """Code, sizes, the server's own timings and its batch size go into the flat record."""

    async def send(number: int) -> Answer:
        return Answer(Status.OK, "200", "", 5, 7, 4, Stages(1, 2, 3, 4, 5, 16))

    record = keep(send, [0])[0]
    assert (record.code, record.sent_bytes, record.received_bytes, record.batch_size) == ("200", 5, 7, 4)
    assert (record.decode_ms, record.preprocess_ms, record.queue_ms, record.infer_ms) == (1, 2, 3, 4)
    assert (record.postprocess_ms, record.total_ms) == (5, 16)


def test_callers_ask_again_when_they_are_answered_until_the_end() -> None:
    """Two callers over a server of 0.3 s make eight requests in a second, and wait for the last two."""

    async def send(number: int) -> Answer:
        await asyncio.sleep(0.3)
        return OK

    async def main(loop: VirtualTimeLoop) -> list[Record]:
        asks = asking(loop, send)
        await run_callers(asks, itertools.count(), callers=2, until_s=1, timeout_s=2)
        return asks.take(100)

    records = run_virtual(main)
    assert since_begin(r.intended_s for r in records) == [0, 0, 0.3, 0.3, 0.6, 0.6, 0.9, 0.9]
    assert all(r.sent_s == r.intended_s for r in records)


def test_mix_keeps_the_shares_and_the_seed() -> None:
    """Three asks by 2 : 1 : 0.0001: the rare one has a place, too, and the order is the seed's."""
    asks = [RequestSpec(kind=Kind.IMAGE, model="m", share=share) for share in (2, 1, 0.0001)]
    slots = mix(asks, seed=1)
    counts = Counter(slots)
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.01)
    assert counts[2] == 1
    assert slots == mix(asks, seed=1) != mix(asks, seed=2)
    assert slots != sorted(slots)


@pytest.mark.parametrize("make", [TimerfdAlarm, LoopAlarm])
async def test_alarm_rings_once_for_the_last_moment_that_was_set(make: type[TimerfdAlarm] | type[LoopAlarm]) -> None:
    """A later set replaces an earlier one, a moment that is past rings at once, and a closed alarm is silent."""
    rung: asyncio.Queue[float] = asyncio.Queue()
    alarm = make(lambda: rung.put_nowait(time.monotonic()))
    at_s = time.monotonic() + 0.05
    alarm.set(at_s + 3600)
    alarm.set(at_s)
    assert at_s - 0.001 <= await asyncio.wait_for(rung.get(), 30)
    alarm.set(at_s)
    await asyncio.wait_for(rung.get(), 30)
    alarm.set(time.monotonic() + 0.02)
    alarm.close()
    alarm.close()
    await asyncio.sleep(0.05)
    assert rung.empty()
