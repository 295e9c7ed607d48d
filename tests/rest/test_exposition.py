"""The metrics port's pages: the gateway's own are there whatever the engine does."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from server.rest.exposition import create_metrics_app


async def page_of(app: Starlette, path: str) -> str:
    """The text of a GET."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}, receive, send)
    return b"".join(message.get("body", b"") for message in sent).decode()


@pytest.mark.parametrize(("is_up", "expected"), [(True, "ours\nengine\n"), (False, "ours\n")])
async def test_metrics_of_an_engine_that_is_down_are_not_waited_for(is_up: bool, expected: str) -> None:
    """The page of both then has ours alone, at once; the engine's own page still asks it."""
    is_hanging = asyncio.Event()

    async def engine() -> bytes:
        if not is_up:
            is_hanging.set()
            await asyncio.Event().wait()
        return b"engine\n"

    app = create_metrics_app(lambda: b"ours\n", engine, lambda: is_up)
    assert await asyncio.wait_for(page_of(app, "/metrics"), 5) == expected
    assert not is_hanging.is_set()
    asking = asyncio.create_task(page_of(app, "/metrics/engine"))
    if is_up:
        assert await asking == "engine\n"
    else:
        await asyncio.wait_for(is_hanging.wait(), 5)
        asking.cancel()
