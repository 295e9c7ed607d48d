"""Clients that do not wait for their answer."""

import asyncio
import threading
from typing import Any

import pytest
import structlog

from penstock.gateway.rest.request import run_until_disconnect
from penstock.protocol.call import InferHead
from penstock.protocol.http_codec import read_head
from tests.rest.harness import VALID_INFER, Client, Front, request_bytes

LONG_INFER = VALID_INFER[:-1] + b',"id":"' + b"a" * (1 << 20) + b'"}'


async def leave(client: Client) -> None:
    """Ends the connection, and returns once the gateway has seen that: it has closed its side."""
    client.writer.write_eof()
    await asyncio.wait_for(client.until_closed(), 20)


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", "/v2/models/ident/infer", VALID_INFER),
        ("POST", "/v2/models/ident/image", b"\xff\xd8\xff"),
        ("GET", "/v2/models/ident/stats", b""),
    ],
)
async def test_disconnect_while_the_plane_works_cancels_the_work(method: str, target: str, body: bytes) -> None:
    """Cancelled at once, counted once, and nothing is logged."""
    front = Front()
    front.plane.holds = True
    with structlog.testing.capture_logs() as logged:
        async with front.served() as port:
            async with Client.connected(port) as client:
                await client.send(request_bytes(method, target, body))
                await asyncio.wait_for(front.plane.entered.wait(), 5)
            await asyncio.wait_for(front.plane.cancelled.wait(), 5)
    assert front.recorder.cancelled_count == 1
    assert front.recorder.done == []
    assert logged == []


async def test_disconnect_after_a_long_body_is_seen() -> None:
    """Longer than what a connection reads ahead: it is read on while the plane works."""
    front = Front()
    front.plane.holds = True
    async with front.served() as port:
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", "/v2/models/ident/infer", LONG_INFER))
            await asyncio.wait_for(front.plane.entered.wait(), 5)
        await asyncio.wait_for(front.plane.cancelled.wait(), 5)
    assert front.recorder.cancelled_count == 1


@pytest.mark.parametrize("size_bytes", [70, 100 << 10])
async def test_disconnect_is_seen_behind_requests_that_wait_in_the_pipeline(size_bytes: int) -> None:
    """The connection is not read while they wait: the next sweep sees its end, and the work is cancelled."""
    front = Front()
    front.plane.holds = True
    async with front.served() as port:
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", "/v2/models/ident/infer", VALID_INFER))
            await asyncio.wait_for(front.plane.entered.wait(), 5)
            await client.send(request_bytes("POST", "/v2/models/ident/infer", VALID_INFER.ljust(size_bytes)))
        await asyncio.wait_for(front.plane.cancelled.wait(), 5)
    assert front.recorder.cancelled_count == 1
    assert len(front.plane.relayed) == 1


async def test_disconnect_while_a_long_body_is_parsed_begins_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body is parsed in a thread; the plane is not asked any more, and the client is counted."""
    front, begun, may_end = Front(), threading.Event(), threading.Event()

    def slow_read_head(*given: Any) -> InferHead:
        begun.set()
        may_end.wait(20)
        return read_head(*given)

    monkeypatch.setattr("penstock.gateway.rest.infer.read_head", slow_read_head)
    async with front.served() as port:
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", "/v2/models/ident/infer", LONG_INFER))
            assert await asyncio.to_thread(begun.wait, 20)
            await leave(client)
        may_end.set()
        async with asyncio.timeout(5):
            while not front.recorder.cancelled_count:
                await asyncio.sleep(0.01)
    assert front.recorder.cancelled_count == 1
    assert not front.plane.entered.is_set()


async def test_disconnect_while_a_model_loads_lets_the_load_end() -> None:
    """The engine would go on loading, and the gateway must learn the outcome."""
    front = Front()
    front.plane.holds = True
    async with front.served() as port:
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", "/v2/repository/models/ident/load"))
            await asyncio.wait_for(front.plane.entered.wait(), 5)
            await leave(client)
        front.plane.released.set()
    assert not front.plane.cancelled.is_set()
    assert front.recorder.cancelled_count == 0


async def never() -> dict[str, str]:
    await asyncio.Event().wait()
    return {}


async def test_work_that_ends_before_a_disconnect_gives_its_result_and_its_errors() -> None:
    """The watch leaves no task behind."""

    async def fail() -> None:
        raise ValueError("as it is")

    assert await run_until_disconnect({}, never, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="as it is"):
        await run_until_disconnect({}, never, fail())
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_work_cancelled_from_outside_stays_cancelled() -> None:
    """A cancellation that is not the disconnect's is not swallowed."""
    task = asyncio.create_task(run_until_disconnect({}, never, never()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
