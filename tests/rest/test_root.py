"""Answers on their way out count until their readers have them."""

import asyncio
from types import SimpleNamespace
from typing import cast

from starlette.responses import Response
from starlette.types import Message

from penstock.gateway.dataplane import DataPlane
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.rest.app import WATCHED_FROM_BYTES, RootMiddleware
from tests.rest.harness import FakeRecorder


async def never() -> Message:
    await asyncio.Event().wait()
    return {}


async def test_large_answer_counts_whole_until_its_reader_has_taken_it() -> None:
    """The transport keeps all of it though the kernel has taken a part: what is unsent would be too little."""
    admission = InFlightLimiter(InFlightLimits())
    plane = cast(DataPlane, SimpleNamespace(admission=admission, is_stopping=False))
    sent: list[Message] = []
    has_body, is_taken = asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        if has_body.is_set():  # as a server's does while the last piece is not taken
            await is_taken.wait()
        sent.append(message)
        if message.get("body"):
            has_body.set()

    size_bytes = WATCHED_FROM_BYTES
    root = RootMiddleware(Response(bytes(size_bytes)), plane, FakeRecorder())
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    answering = asyncio.create_task(root(scope, never, send))
    async with asyncio.timeout(30):
        await has_body.wait()
        await asyncio.sleep(0)
        assert admission.statistics().size_bytes == size_bytes
        is_taken.set()
        await answering
    assert admission.statistics().size_bytes == 0
    assert b"".join(message.get("body", b"") for message in sent) == bytes(size_bytes)
    assert [message.get("more_body", False) for message in sent] == [False, True, False]
