"""What may befall a request that shares its batch, over real sockets in the real Triton: its batch-mates never notice.

`test_batching` looks at what callers see; these at what the gateway counted and the model got besides.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests.integration.ledger import (
    FEWER,
    UNTIL_RELEASED,
    Caller,
    Ledgers,
    ended,
    inferences,
    open_request,
    page_of,
    write_ledger,
)
from tests.integration.living import inflight, running
from tests.support.waiting import until, wait_for

pytestmark = pytest.mark.xdist_group("ledgers")

MODEL = "naps"
NEVER_S = "the model never got it"


@pytest.fixture(autouse=True)
def accounted(ledgers: Ledgers) -> Iterator[None]:
    """Whatever a test does: when nothing is in flight any more, what was accepted has an end, and one only."""
    yield
    wait_for(lambda: inflight(ledgers.stack) == 0, 10, "nothing in flight")
    found = inferences(page_of(ledgers.stack))
    assert found["accepted"] == ended(found), found


@pytest.fixture
def counted(ledgers: Ledgers) -> Callable[[], Counter[str]]:
    """What became of inferences since the test began."""
    before = inferences(page_of(ledgers.stack))
    return lambda: inferences(page_of(ledgers.stack)) - before


@asynccontextmanager
async def calling(ledgers: Ledgers) -> AsyncIterator[Caller]:
    async with tritonclient.grpc.aio.InferenceServerClient(ledgers.stack.grpc_address) as client:
        yield Caller(client)


@asynccontextmanager
async def busy(ledgers: Ledgers, model: str = MODEL) -> AsyncIterator[Caller]:
    """The model works, and what could wait at its door has come: who asks now waits in the queue.

    It works until `in_queue`, `Ledgers.release` or the end of the block. The two that it works for have shapes of their
    own, so that no other request shares their batches.
    """
    async with calling(ledgers) as caller:
        seen = len(ledgers.calls(model))
        ledgers.unrelease(model)
        holds = [caller.ask(model, [0, UNTIL_RELEASED, 0])]
        await until(lambda: len(ledgers.calls(model)) > seen)
        holds.append(caller.ask(model, [0, 1, 0, 0]))
        await asyncio.sleep(0.05)
        yield caller
        if not holds[0].done():
            ledgers.release(model)
        await asyncio.gather(*holds)
        ledgers.unrelease(model)


async def in_queue(ledgers: Ledgers, requests: int, model: str = MODEL, *, release: bool = True) -> None:
    """Wait until so many wait there, or one more: that of `busy` may be at the door already or not.

    release: whether the running call ends then.
    """
    async with asyncio.timeout(30):
        while ledgers.waiting(model) < requests:
            await asyncio.sleep(0.01)
    if release:
        ledgers.release(model)


async def test_who_leaves_the_queue_is_counted_there_and_never_executed(
    ledgers: Ledgers, counted: Callable[[], Counter[str]]
) -> None:
    """FAULTS 24. A closed connection over REST, a cancelled call over gRPC; who stays is answered."""
    async with busy(ledgers) as caller:
        stays, leaves = caller.ask(MODEL, [11, 0]), caller.ask(MODEL, [12, 0])
        closes = await asyncio.to_thread(open_request, ledgers.stack, MODEL, [13, 0])
        await in_queue(ledgers, 3, release=False)
        leaves.cancel()
        closes.close()
        await until(lambda: counted()["cancelled/queue"] == 2)
        ledgers.release(MODEL)
        assert await stays == [11]
    assert not {12, 13} & set(ledgers.values(MODEL)), NEVER_S
    assert counted() == {"accepted": 5, "answered": 3, "cancelled/queue": 2}


async def test_who_leaves_a_running_batch_of_four_is_counted_there_and_the_others_get_their_rows(
    ledgers: Ledgers, counted: Callable[[], Counter[str]]
) -> None:
    """FAULTS 25, 26. It was one call of the engine, and it ran to its end."""
    async with busy(ledgers) as caller:
        asked = [caller.ask(MODEL, [value, UNTIL_RELEASED]) for value in (21, 22, 23)]
        closes = await asyncio.to_thread(open_request, ledgers.stack, MODEL, [24, UNTIL_RELEASED])
        await in_queue(ledgers, 4)
        await until(lambda: 21 in ledgers.values(MODEL))
        asked[1].cancel()
        closes.close()
        await until(lambda: counted()["cancelled/batch"] == 2)
        ledgers.release(MODEL)
        ends = await asyncio.gather(*asked, return_exceptions=True)
    assert [end for end in ends if isinstance(end, list)] == [[21], [23]]
    (one_call,) = [line["values"] for line in ledgers.calls(MODEL) if 21 in line["values"]]
    assert sorted(one_call) == [21, 22, 23, 24]
    assert not [line for line in ledgers.lines(MODEL) if 21 in line.get("cancelled", ())]
    assert counted() == {"accepted": 6, "answered": 4, "cancelled/batch": 2}


async def test_batch_that_everybody_left_is_cancelled_in_the_model(
    ledgers: Ledgers, counted: Callable[[], Counter[str]]
) -> None:
    """FAULTS 26. is_cancelled() there, and the instance is free for who comes next."""
    async with busy(ledgers) as caller:
        asked = [caller.ask(MODEL, [value, 20_000]) for value in (31, 32, 33)]
        await in_queue(ledgers, 3)
        await until(lambda: 31 in ledgers.values(MODEL))
        for task in asked:
            task.cancel()
        await until(lambda: any(31 in line.get("cancelled", ()) for line in ledgers.lines(MODEL)))
        started = time.monotonic()
        assert await caller.ask(MODEL, [34, 0]) == [34]
        assert time.monotonic() - started < 5
    await until(lambda: counted()["cancelled/batch"] == 3)


async def test_answer_of_too_few_rows_fails_its_batch_alone_with_the_reason(
    ledgers: Ledgers, counted: Callable[[], Counter[str]]
) -> None:
    """500 over REST, INTERNAL over gRPC: no client gets the row of another; the next batch is served."""
    async with busy(ledgers) as caller:
        asked = [caller.ask(MODEL, [value, 0]) for value in (41, FEWER, 42)]
        over_rest = asyncio.create_task(asyncio.to_thread(ledgers.post, MODEL, [[43, 0]]))
        await in_queue(ledgers, 4)
        ends = await asyncio.gather(*asked, return_exceptions=True)
        answer = await over_rest
        assert await caller.ask(MODEL, [44, 0]) == [44]
    assert any({41, FEWER, 42, 43} == set(line["values"]) for line in ledgers.calls(MODEL))
    for end in ends:
        assert isinstance(end, InferenceServerException), end
        assert "INTERNAL" in str(end)
        assert f"model '{MODEL}'" in str(end), end
    assert (answer.status, answer.json["error"]) == (500, ends[0].message()), answer.body


async def test_deadline_that_passes_in_the_queue_is_reported_then_and_the_request_never_executed(
    ledgers: Ledgers, counted: Callable[[], Counter[str]]
) -> None:
    """504 over both protocols while all slots are busy: at the deadline, and not when a slot is free at last."""
    timeout = {"x-request-timeout-ms": "500"}
    async with busy(ledgers, "short") as caller:
        started = time.monotonic()
        over_rest = asyncio.create_task(asyncio.to_thread(ledgers.post, "short", [[51, 0]], **timeout))
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            await caller.ask("short", [52, 0], timeout=500_000)
        answer = await over_rest
        assert time.monotonic() - started > 0.45
        assert (answer.status, "in short's queue" in answer.json["error"]) == (504, True), answer.body
    assert not {51, 52} & set(ledgers.values("short")), NEVER_S
    assert counted()["failed/deadline"] == 2


async def test_requests_that_differ_never_share_a_call_and_equal_ones_do(ledgers: Ledgers) -> None:
    """In the shape of a row, the outputs that they want, or the parameters; each gets its own row."""
    async with busy(ledgers) as caller:
        kinds: list[tuple[list[float], str, dict[str, object]]] = [
            ([0, 0], "y", {}),
            ([0, 0, 0, 0, 0], "y", {}),
            ([0, 0], "z", {}),
            ([0, 0], "y", {"parameters": {"colour": "red"}}),
            ([0, 0], "y", {"parameters": {"colour": "blue"}}),
        ]
        asked = {}
        for number in range(3):
            for kind, (row, output, how) in enumerate(kinds):
                value = 600.0 + 10 * kind + number
                asked[value] = caller.ask(MODEL, [value, *row[1:]], output=output, **how)
        await in_queue(ledgers, len(asked))
        assert {value: await task for value, task in asked.items()} == {value: [value] for value in asked}
    calls = [sorted(line["values"]) for line in ledgers.calls(MODEL) if 600 <= line["values"][0] < 700]
    assert sorted(calls) == [[600.0 + 10 * kind + number for number in range(3)] for kind in range(len(kinds))]


async def test_full_queue_is_503_with_a_time_to_return_and_costs_those_who_wait_nothing(
    ledgers: Ledgers, counted: Callable[[], Counter[str]]
) -> None:
    """The fifth of four: refused at once over both protocols, with the limit in the message."""
    async with busy(ledgers, "short"):
        connections = []
        while (waiting := ledgers.waiting("short")) < 4:
            connections.append(
                await asyncio.to_thread(open_request, ledgers.stack, "short", [700 + len(connections), 0])
            )
            await in_queue(ledgers, waiting + 1, "short", release=False)
        answer = await asyncio.to_thread(ledgers.post, "short", [[710, 0]])
        assert answer.status == 503, answer.body
        assert "(limit 4) wait for short" in answer.json["error"]
        assert int(answer.headers["retry-after"]) >= 1
    for connection in connections:
        connection.settimeout(10)
        assert b" 200 OK" in connection.recv(100)
        connection.close()
    assert 710 not in ledgers.values("short"), NEVER_S
    assert page_of(ledgers.stack)["penstock_batch_refused_total/short/queue_full"] >= 1


async def test_request_of_more_rows_than_a_batch_is_refused_in_tritons_words(ledgers: Ledgers) -> None:
    """400 and INVALID_ARGUMENT; it takes no slot and delays no other request."""
    rows = [[800.0 + number, 0.0] for number in range(9)]
    said = "batch-size must be <= 8"
    async with calling(ledgers) as caller:
        answer = await asyncio.to_thread(ledgers.post, MODEL, rows)
        assert (answer.status, said in answer.json["error"]) == (400, True), answer.body
        with pytest.raises(InferenceServerException, match=said):
            await caller.ask(MODEL, *rows)
        assert await caller.ask(MODEL, [810, 0]) == [810]
    assert 800 not in ledgers.values(MODEL), NEVER_S


@pytest.mark.parametrize("milliseconds", ["0", "-1", "-" + "9" * 400])
def test_deadline_that_is_past_is_504_without_a_place_in_a_batch(
    ledgers: Ledgers, counted: Callable[[], Counter[str]], milliseconds: str
) -> None:
    """FAULTS 28. Refused before it counts as accepted; the model never hears of it."""
    calls = len(ledgers.calls(MODEL))
    answer = ledgers.post(MODEL, [[900, 0]], **{"x-request-timeout-ms": milliseconds})
    assert answer.status == 504, answer.body
    assert len(ledgers.calls(MODEL)) == calls
    assert not counted()


def test_deadline_in_a_thousand_years_is_as_good_as_none(ledgers: Ledgers) -> None:
    """FAULTS 28. Clamped: it overflows no timer, and forms batches as ever."""
    assert ledgers.post(MODEL, [[910, 0]], **{"x-request-timeout-ms": "9" * 400}).status == 200


async def test_what_runs_and_what_waits_at_sigterm_is_answered(tmp_path: Path, triton_environment: Path) -> None:
    """A call and two batches, over both protocols, none of them failed; then the stack is gone."""
    write_ledger(tmp_path, MODEL)
    with running(tmp_path, tmp_path / "models") as stack:
        own = Ledgers(stack, tmp_path)
        async with busy(own) as caller:
            asked = [caller.ask(MODEL, [value, 200]) for value in range(10)]
            over_rest = [asyncio.create_task(asyncio.to_thread(own.post, MODEL, [[20, 200]])) for _ in range(2)]
            await in_queue(own, 12, release=False)
            stack.process.terminate()
            stack.wait_for_log("draining|stopping")
            own.release(MODEL)
            assert await asyncio.gather(*asked) == [[value] for value in range(10)]
            assert [answer.status for answer in await asyncio.gather(*over_rest)] == [200] * 2
        assert await asyncio.to_thread(stack.process.wait, 20) == 0, "".join(stack.log[-30:])
    assert len(own.calls(MODEL)) < 10
