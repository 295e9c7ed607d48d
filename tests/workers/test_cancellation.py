"""Cancelled inferences between a worker and the core: in which stage each was."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from penstock.gateway.workers.client import CoreClient
from penstock.gateway.workers.connection import (
    CANCELLATION_TIMEOUT_S,
    SOCKET_NAME,
    CancelInfer,
    CancelledAt,
    CoreState,
    Infer,
    Inferred,
    MessageConnection,
    PendingCancellations,
    ToCore,
    WorkerHello,
    failed_message,
)
from penstock.protocol.cancellation import CancelStage, when_stage_known
from penstock.protocol.errors import DeadlineExceeded
from penstock.protocol.inference import InferRequest, InferResponse


def test_departure_is_resolved_once_by_the_core_or_without_it() -> None:
    """Its word, an answer that crossed the question, its silence, its end: what comes after counts no more."""
    departures, stages = PendingCancellations(), []
    for number in (1, 2, 3):
        departures.wait(number, CancelStage.BATCH, 100.0).when_resolved(stages.append)
    departures.tell(1, CancelStage.QUEUE)
    departures.tell(2)
    assert stages == [CancelStage.QUEUE, CancelStage.BATCH]
    departures.expire(100.0 + CANCELLATION_TIMEOUT_S / 2)
    assert len(stages) == 2
    departures.expire(100.0 + CANCELLATION_TIMEOUT_S)
    assert stages[2:] == [CancelStage.BATCH]
    departures.wait(4, CancelStage.ENGINE, 200.0).when_resolved(stages.append)
    departures.lose()
    departures.tell(4, CancelStage.QUEUE)
    departures.tell(77, CancelStage.QUEUE)
    assert stages[3:] == [CancelStage.ENGINE]
    assert len(departures) == 0


Farewell = Callable[[MessageConnection[ToCore], int], object]
FAREWELLS: dict[str, tuple[Farewell, CancelStage]] = {
    "says where it was": (lambda line, number: line.send(CancelledAt(number, CancelStage.QUEUE)), CancelStage.QUEUE),
    "says so twice": (
        lambda line, number: [line.send(CancelledAt(number, CancelStage.QUEUE)) for _ in range(2)],
        CancelStage.QUEUE,
    ),
    "had answered": (
        lambda line, number: line.send(Inferred(number, InferResponse("owned", "1", ()))),
        CancelStage.BATCH,
    ),
    "had refused": (
        lambda line, number: line.send(failed_message(number, DeadlineExceeded("late"))),
        CancelStage.BATCH,
    ),
    "dies": (lambda line, _: line.close(), CancelStage.BATCH),
    "does not answer": (lambda *_: None, CancelStage.BATCH),
}


@asynccontextmanager
async def core_that(farewell: Farewell, folder: Path) -> AsyncIterator[tuple[CoreClient, asyncio.Event]]:
    """A link to a core that takes what it is asked and bids this farewell; and whether it was asked something."""
    asked = asyncio.Event()

    def hear(line: MessageConnection[ToCore], record: ToCore) -> None:
        if isinstance(record, WorkerHello):
            line.send(CoreState(True, "", 1, (), ("owned",)))
        elif isinstance(record, Infer):
            asked.set()
        elif isinstance(record, CancelInfer):
            farewell(line, record.number)

    decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
    lines: list[MessageConnection[ToCore]] = []

    def new_line() -> MessageConnection[ToCore]:
        lines.append(MessageConnection(decoder, hear, lambda _: None))
        return lines[-1]

    server = await asyncio.get_running_loop().create_unix_server(new_line, str(folder / SOCKET_NAME))
    link = CoreClient(folder, WorkerHello(1), max_asks=4)
    running = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(30):
            await link.first_up.wait()
            yield link, asked
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for line in lines:
            line.close()
        server.close()
        await asyncio.sleep(0)  # what is closed is gone with the loop's next turn


@pytest.mark.parametrize("name", FAREWELLS)
async def test_caller_that_left_is_counted_once_by_what_is_known(tmp_path: Path, name: str) -> None:
    """The client is released at once; its stage follows within a moment, and no trace of it stays."""
    farewell, expected = FAREWELLS[name]
    async with core_that(farewell, tmp_path) as (link, asked):
        asking = asyncio.create_task(link.infer(InferRequest("owned", ()), client="c"))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await asking
        stages: list[CancelStage] = []
        when_stage_known(cancelled.value, CancelStage.STREAM, stages.append)
        assert stages == []
        while not stages:
            await asyncio.sleep(0.01)
        assert stages == [expected]
        assert len(link._departures) == 0


async def test_caller_that_leaves_a_core_that_is_gone_is_counted_at_once(tmp_path: Path) -> None:
    """There is no core to ask."""
    async with core_that(FAREWELLS["does not answer"][0], tmp_path) as (link, asked):
        asking = asyncio.create_task(link.infer(InferRequest("owned", ()), client="c"))
        await asked.wait()
        link._require_line().close()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await asking
        stages: list[CancelStage] = []
        when_stage_known(cancelled.value, CancelStage.STREAM, stages.append)
        assert stages == [CancelStage.BATCH]
