"""The queue under asyncio: every request one end of its own, whatever becomes of the batch around it."""

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from unittest.mock import Mock, call

import pytest

from penstock.gateway.batching import engine_call
from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.tracing import Trace, current_trace
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
    Overloaded,
)
from penstock.protocol.inference import BatchOwner, CloseReason, InferRequest, InferResponse
from tests.batching.echo_engine import POISON, EchoEngine, asking, rows_in

OWNED = BatchOptions(owner=BatchOwner.GATEWAY, max_batch_size=8, instances=1)


@dataclass
class Rig:
    """A pool over an engine. options: of its one model, None if it is gone."""

    engine: EchoEngine
    pool: BatcherPool
    options: BatchOptions | None = OWNED

    def ask(self, request: InferRequest, **how: object) -> "asyncio.Task[InferResponse]":
        client, priority = str(how.get("client", "one")), how.get("priority", 0)
        assert isinstance(priority, int)
        return asyncio.create_task(self.pool.infer(request, client=client, priority=priority))

    async def occupied(self) -> "asyncio.Task[InferResponse]":
        """The engine runs a first call that does not end, and takes no second."""
        self.engine.gate.clear()
        first = self.ask(asking(100))
        await self.engine.called(1)
        return first

    def is_empty(self) -> bool:
        statistics = self.pool.statistics()["m"]
        return not (statistics.depth or statistics.in_flight or self.engine.running)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    engine = EchoEngine()
    found = Rig(engine, BatcherPool(engine, lambda name: found.options if name == "m" else None))
    await found.pool.infer(asking(*range(8)), client="first")  # a full batch went well: the next may be full
    engine.forget()
    yield found
    await found.pool.aclose()


async def test_tensors_of_a_batch_that_is_over_are_free_at_once(rig: Rig) -> None:
    """They wait for no collection of garbage: that may come a thousand requests later."""
    requests = [asking(number) for number in range(3)]
    tensors = [weakref.ref(request.inputs[0].data.obj) for request in requests]
    gc.disable()
    try:
        await asyncio.gather(*[rig.pool.infer(request, client="one") for request in requests])
        requests.clear()
        rig.engine.forget()
        await asyncio.sleep(0)
        assert all(tensor() is None for tensor in tensors)
    finally:
        gc.enable()


async def test_idle_engine_is_asked_at_once(rig: Rig) -> None:
    """A lone request is its own batch, formed in the turn in which it came, and says so."""
    response = await rig.ask(asking(1, 2, id="seven"))
    assert rows_in(response) == [2, 3]
    assert response.id == "seven"
    assert response.explanation is not None
    assert (response.explanation.rows, response.explanation.requests) == (2, 1)
    assert response.explanation.close_reason is CloseReason.SLOT_FREE
    assert response.timings.batch_size == 2
    assert rig.is_empty()


async def test_requests_of_one_turn_share_a_call(rig: Rig) -> None:
    """What arrives together goes together, and each gets its own rows under its own id."""
    asked = [rig.ask(asking(float(n), id=str(n)), client=str(n)) for n in range(4)]
    responses = await asyncio.gather(*asked)
    assert len(rig.engine.calls) == 1
    assert rig.engine.requests[0].id == ""
    assert [(rows_in(one), one.id) for one in responses] == [([n + 1.0], str(n)) for n in range(4)]
    assert {one.explanation.requests for one in responses if one.explanation} == {4}


async def test_call_that_the_engine_cancels_fails_its_requests(rig: Rig) -> None:
    """No client waits for ever for an engine that raises CancelledError by itself; the next request is served."""
    rig.engine.refusals.append(asyncio.CancelledError())  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*[rig.ask(asking(float(n))) for n in range(3)], return_exceptions=True)
    assert [repr(end) for end in ends] == [repr(EngineFailed("the engine cancelled the call of model 'm'"))] * 3
    assert rows_in(await rig.ask(asking(1))) == [2]


async def test_client_that_leaves_the_queue_is_never_run(rig: Rig) -> None:
    """A place in the queue is another's at once."""
    first = await rig.occupied()
    waiting = [rig.ask(asking(float(n))) for n in range(3)]
    await asyncio.sleep(0)
    in_engine = [row for call in rig.engine.calls for row in call]
    leaves = rig.ask(asking(50))
    await asyncio.sleep(0)
    depth = rig.pool.statistics()["m"].depth
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert rig.pool.statistics()["m"].depth == depth - 1
    rig.engine.gate.set()
    await asyncio.gather(first, *waiting)
    assert 50 not in [row for call in rig.engine.calls for row in call]
    assert in_engine == [100]
    assert rig.is_empty()


async def test_client_that_leaves_a_running_batch_costs_the_others_nothing(rig: Rig) -> None:
    """Cancel one of four that run: the other three get their own rows, and the engine's call goes on."""
    rig.engine.gate.clear()
    asked = [rig.ask(asking(float(n))) for n in range(4)]
    await rig.engine.called(1)
    asked[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked[1]
    rig.engine.gate.set()
    assert [rows_in(await asked[n]) for n in (0, 2, 3)] == [[1], [3], [4]]
    assert rig.engine.cancelled == 0
    assert rig.is_empty()


async def test_call_without_waiting_members_is_given_up(rig: Rig) -> None:
    """When the last member has left, the engine's call is cancelled and the slot is free."""
    rig.engine.gate.clear()
    asked = [rig.ask(asking(float(n))) for n in range(3)]
    await rig.engine.called(1)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.sleep(0)
    rig.engine.gate.set()
    assert rows_in(await rig.ask(asking(7))) == [8]
    assert rig.engine.cancelled == 1
    assert rig.is_empty()


async def test_call_given_up_before_it_began_frees_its_slot(rig: Rig) -> None:
    """Members that leave in the very turn in which their batch is formed leave nothing behind."""
    asked = [rig.ask(asking(float(n))) for n in range(3)]
    await asyncio.sleep(0)  # they are in the queue, and their batch is formed next
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.sleep(0)
    assert rig.engine.calls == []
    assert rig.is_empty()
    assert rows_in(await rig.ask(asking(7))) == [8]


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), Overloaded("the engine's queue is full")])
async def test_engine_that_is_gone_ends_the_whole_batch(rig: Rig, error: InferenceError) -> None:
    """Every member gets the same error, each an object of its own, and the engine is asked no more."""
    rig.engine.refusals.append(error)
    ends = await asyncio.gather(*[rig.ask(asking(float(n))) for n in range(3)], return_exceptions=True)
    assert [(type(end), str(end)) for end in ends] == [(type(error), str(error))] * 3
    assert len({id(end) for end in ends}) == 3
    assert len(rig.engine.calls) == 1
    assert rig.is_empty()


@pytest.mark.parametrize("error", [InvalidRequest("row of -1"), EngineFailed("model failed"), OutOfMemory("no room")])
async def test_request_that_the_engine_refuses_fails_alone(rig: Rig, error: InferenceError) -> None:
    """A merged call that fails is asked again in halves: only the culprit gets the error."""
    rig.engine.poison_error = error
    asked = [rig.ask(asking(POISON if n == 5 else float(n))) for n in range(8)]
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(ends[5], type(error))
    assert [rows_in(end) for n, end in enumerate(ends) if n != 5 and not isinstance(end, BaseException)] == [
        [n + 1.0] for n in range(8) if n != 5
    ]
    assert rig.engine.most_running == 1
    assert rig.is_empty()


@pytest.mark.parametrize("bad", [(5,), (0, 3, 7), tuple(range(8))])
async def test_requests_whose_rows_the_engine_names_fail_at_once(rig: Rig, bad: tuple[int, ...]) -> None:
    """The others run again together: one call more, and none if all are bad; the next batch has the same."""
    rig.engine.poison_error, rig.engine.names_rows = InvalidRequest("no picture"), True
    for _ in range(2):
        rig.engine.calls.clear()
        asked = [rig.ask(asking(POISON if n in bad else float(n))) for n in range(8)]
        ends = await asyncio.gather(*asked, return_exceptions=True)
        refused = [str(end) for end in ends if isinstance(end, InvalidRequest)]
        assert refused == ["model 'm': no picture"] * len(bad)
        answered = [rows_in(end)[0] for end in ends if not isinstance(end, BaseException)]
        assert answered == [n + 1.0 for n in range(8) if n not in bad]
        assert len(rig.engine.calls) == 1 + (len(bad) < 8)
        assert rig.is_empty()


async def test_broken_model_is_asked_few_more_times(rig: Rig) -> None:
    """Where every call fails, what is asked again is bounded, and less once that is known."""
    rig.engine.poison_error = EngineFailed("model failed")
    for _ in range(2):
        ends = await asyncio.gather(*[rig.ask(asking(POISON)) for _ in range(8)], return_exceptions=True)
        assert all(isinstance(end, EngineFailed) for end in ends)
    assert len(rig.engine.calls) <= (1 + 12) + 1


async def test_out_of_memory_lowers_the_batch(rig: Rig) -> None:
    """The next batches are half as large."""
    rig.engine.refusals.append(OutOfMemory("no room"))
    await asyncio.gather(*[rig.ask(asking(float(n))) for n in range(8)])
    assert rig.pool.statistics()["m"].max_rows <= 4
    rig.engine.calls.clear()
    await asyncio.gather(*[rig.ask(asking(float(n))) for n in range(8)])
    assert max(len(call) for call in rig.engine.calls) <= 5


async def test_answer_with_too_few_rows_is_nobodys(rig: Rig) -> None:
    """No member is given rows that may be another's."""
    rig.engine.missing_rows = 1
    ends = await asyncio.gather(*[rig.ask(asking(float(n))) for n in range(3)], return_exceptions=True)
    assert all(isinstance(end, EngineFailed) for end in ends)
    assert rig.is_empty()


async def test_deadline_that_passes_in_the_engine_ends_that_request_only(rig: Rig) -> None:
    """504 at the deadline for the one, its own rows for the other."""
    rig.engine.gate.clear()
    started = time.monotonic()
    hurried = rig.ask(asking(1, deadline=started + 0.05))
    patient = rig.ask(asking(2, deadline=started + 60))
    with pytest.raises(DeadlineExceeded, match="passed while a batch of 2 rows ran"):
        await hurried
    assert 0.045 < time.monotonic() - started < 5
    rig.engine.gate.set()
    assert rows_in(await patient) == [3]
    assert rig.engine.cancelled == 0


async def test_call_that_is_overdue_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that hangs is let go some time after the last deadline, and its slot is free."""
    monkeypatch.setattr(engine_call, "OVERDUE_S", 0.05)
    rig.engine.gate.clear()
    deadline = time.monotonic() + 0.03
    ends = await asyncio.gather(*[rig.ask(asking(1, deadline=deadline)) for _ in range(2)], return_exceptions=True)
    assert [type(end) for end in ends] == [DeadlineExceeded] * 2
    async with asyncio.timeout(30):
        while not rig.is_empty():
            await asyncio.sleep(0.01)
    assert rig.engine.cancelled == 1


async def test_late_engine_is_never_asked_beyond_its_slots(rig: Rig) -> None:
    """Deadlines that pass end the requests, not the engine's work: its slot stays taken until the call has ended."""
    rig.engine.gate.clear()
    for number in range(6):
        deadline = time.monotonic() + 0.02
        with pytest.raises((DeadlineExceeded, Overloaded)):
            await rig.ask(asking(float(number), deadline=deadline))
    assert rig.engine.running <= OWNED.slots
    assert rig.engine.cancelled == 0
    rig.engine.gate.set()
    assert rows_in(await rig.ask(asking(9, deadline=time.monotonic() + 60))) == [10]
    assert rig.is_empty()


async def test_engine_too_slow_for_the_deadlines_is_learned_and_said_at_the_door(rig: Rig) -> None:
    """After a few late calls of the one size that there is, what cannot be met is 503 at once, not 504 in its time."""
    rig.engine.takes_s = 0.04
    ends: list[InferenceError] = []
    async with asyncio.timeout(60):
        while not any(isinstance(end, Overloaded) for end in ends):
            asked = [rig.ask(asking(1, deadline=time.monotonic() + 0.02)) for _ in range(3)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            ends += [end for end in found if isinstance(end, InferenceError)]
            await asyncio.sleep(0.01)
    refused = next(end for end in ends if isinstance(end, Overloaded))
    assert refused.reason == "cannot_meet"
    assert isinstance(ends[0], DeadlineExceeded)


async def test_deadline_that_passes_in_the_queue_never_reaches_the_engine(rig: Rig) -> None:
    """504 without a call."""
    first = await rig.occupied()
    second = rig.ask(asking(200))
    await asyncio.sleep(0)
    late = rig.ask(asking(1, deadline=time.monotonic() + 0.03))
    with pytest.raises(DeadlineExceeded):
        await late
    rig.engine.gate.set()
    await asyncio.gather(first, second)
    assert 1 not in [row for call in rig.engine.calls for row in call]


async def test_what_delivering_takes_is_learned_behind_the_members_own_turns(rig: Rig) -> None:
    """A millisecond that each member's task takes before it lets go is counted for each row."""

    async def ask_and_encode(value: float) -> None:
        await rig.pool.infer(asking(value), client="one")
        time.sleep(0.001)  # noqa: ASYNC251 - as encoding an answer holds the loop

    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 4, 8):
        await asyncio.gather(*[ask_and_encode(value) for value in range(rows)])
    fit = rig.pool.statistics()["m"].fit
    assert fit is not None
    assert 0.001 <= fit.deliver_s < 0.1


async def test_pool_that_closes_leaves_no_request_waiting(rig: Rig) -> None:
    """What waits and what runs ends with a reason."""
    first = await rig.occupied()
    others = [rig.ask(asking(float(n))) for n in range(3)]
    await asyncio.sleep(0)
    await rig.pool.aclose()
    ends = await asyncio.gather(first, *others, return_exceptions=True)
    assert all(isinstance(end, EngineUnavailable | Overloaded) for end in ends)
    assert rig.is_empty()


async def test_statistics_count_what_earlier_options_did_and_still_do(rig: Rig) -> None:
    """A reload loses no counts: requests under earlier options are included, and totals never decrease."""
    first = await rig.occupied()
    waiting = [rig.ask(asking(float(n))) for n in range(3)]
    await asyncio.sleep(0)
    before = rig.pool.statistics()["m"]
    assert (before.in_flight, before.depth) == (1, 3)
    batches = 1 + sum(before.closed_by.values())
    rig.options = replace(OWNED, max_batch_size=2)
    later = rig.ask(asking(9))
    await rig.engine.called(2)
    during = rig.pool.statistics()["m"]
    assert (during.in_flight, during.depth, during.rows) == (2, 3, 3)
    rig.engine.gate.set()
    await asyncio.gather(first, *waiting, later)
    for size in (3, 4, 5):
        rig.options = replace(OWNED, max_batch_size=size)
        await rig.pool.infer(asking(1), client="one")
        after = rig.pool.statistics()["m"]
        assert sum(after.closed_by.values()) == sum(after.batches_by_rows.values()) == batches + size - 1
        assert (after.in_flight, after.depth) == (0, 0)


async def test_options_that_change_hold_for_what_comes_later(rig: Rig) -> None:
    """A model that was loaded anew has a queue of its own; what was in the old one ends there."""
    first = await rig.occupied()
    rig.options = replace(OWNED, max_batch_size=2)
    later = [rig.ask(asking(float(n))) for n in range(4)]
    await rig.engine.called(2)
    rig.engine.gate.set()
    await asyncio.gather(first, *later)
    assert max(len(call) for call in rig.engine.calls[1:]) <= 2
    rig.options = None
    assert not rig.pool.owns("m")
    assert rig.pool.enter(asking(1), client="one") is None
    with pytest.raises(ModelNotFound):
        await rig.pool.infer(asking(1), client="one")


PARENT = (("traceparent", "00-1-2-01"),)


def trace_of() -> Mock:
    trace = Mock(Trace)
    trace.engine.return_value.headers = PARENT
    return trace


def ask_traced(pool: BatcherPool, number: float, trace: Trace | None) -> "asyncio.Task[InferResponse]":
    """A request of its own task, and so of its own trace."""

    async def traced() -> InferResponse:
        current_trace.set(trace)
        return await pool.infer(asking(number), client="one")

    return asyncio.create_task(traced())


async def test_first_traced_member_has_the_engines_call_and_the_others_its_duration() -> None:
    """The engine's own spans hang under one trace; none of the others lacks its time there."""
    engine = EchoEngine()
    pool = BatcherPool(engine, lambda _: OWNED)
    first, second = trace_of(), trace_of()
    await asyncio.gather(ask_traced(pool, 1.0, None), ask_traced(pool, 2.0, first), ask_traced(pool, 3.0, second))
    assert engine.calls == [[1.0, 2.0, 3.0]]
    assert engine.requests[0].metadata == PARENT
    first.engine.assert_called_once_with("engine")
    first.engine.return_value.end.assert_called_once_with(is_error=False)
    assert [[name for name, _ in one.args[0]] for one in first.stages.call_args_list] == [["queue"]]
    assert [[name for name, _ in one.args[0]] for one in second.stages.call_args_list] == [["queue", "engine"]]
    assert call.engine("engine") not in second.mock_calls
    await pool.aclose()
