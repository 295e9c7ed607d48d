"""A caller that leaves what the core has of his is counted once, whatever the core does instead of an answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from server.core.errors import DeadlineExceeded
from server.core.infer import InferRequest, InferResponse
from server.core.leaving import LeftAt, when_known
from server.local.batch_line import SOCKET_NAME, BatchLine
from server.local.core_link import CoreLink
from server.local.messages import UP, Answer, Ask, GiveUp, Hello, Left, State, failed

Farewell = Callable[[BatchLine[UP], int], object]
FAREWELLS: dict[str, tuple[Farewell, LeftAt]] = {
    "says where it was": (lambda line, number: line.send(Left(number, LeftAt.QUEUE)), LeftAt.QUEUE),
    "says so twice": (lambda line, number: [line.send(Left(number, LeftAt.QUEUE)) for _ in range(2)], LeftAt.QUEUE),
    "had answered": (lambda line, number: line.send(Answer(number, InferResponse("owned", "1", ()))), LeftAt.BATCH),
    "had refused": (lambda line, number: line.send(failed(number, DeadlineExceeded("late"))), LeftAt.BATCH),
    "dies": (lambda line, _: line.close(), LeftAt.BATCH),
    "does not answer": (lambda *_: None, LeftAt.BATCH),
}


@asynccontextmanager
async def core_that(farewell: Farewell, folder: Path) -> AsyncIterator[tuple[CoreLink, asyncio.Event]]:
    """A link to a core that takes what it is asked and bids this farewell; and whether it was asked something."""
    asked = asyncio.Event()

    def hear(line: BatchLine[UP], record: UP) -> None:
        if isinstance(record, Hello):
            line.send(State(True, "", 1, (), ("owned",)))
        elif isinstance(record, Ask):
            asked.set()
        elif isinstance(record, GiveUp):
            farewell(line, record.number)

    decoder: msgspec.msgpack.Decoder[UP] = msgspec.msgpack.Decoder(UP)
    lines: list[BatchLine[UP]] = []

    def new_line() -> BatchLine[UP]:
        lines.append(BatchLine(decoder, hear, lambda _: None))
        return lines[-1]

    server = await asyncio.get_running_loop().create_unix_server(new_line, str(folder / SOCKET_NAME))
    link = CoreLink(folder, Hello(1), max_asks=4)
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
    """He is let go at once; where he was is heard of within a moment, and no trace of him stays."""
    farewell, expected = FAREWELLS[name]
    async with core_that(farewell, tmp_path) as (link, asked):
        asking = asyncio.create_task(link.infer(InferRequest("owned", ()), client="c"))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await asking
        told: list[LeftAt] = []
        when_known(cancelled.value, LeftAt.STREAM, told.append)
        assert told == []
        while not told:
            await asyncio.sleep(0.01)
        assert told == [expected]
        assert len(link._departures) == 0


async def test_caller_that_leaves_a_core_that_is_gone_is_counted_at_once(tmp_path: Path) -> None:
    """Nobody is there to ask."""
    async with core_that(FAREWELLS["does not answer"][0], tmp_path) as (link, asked):
        asking = asyncio.create_task(link.infer(InferRequest("owned", ()), client="c"))
        await asked.wait()
        link._require_line().close()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await asking
        told: list[LeftAt] = []
        when_known(cancelled.value, LeftAt.STREAM, told.append)
        assert told == [LeftAt.BATCH]
