"""What a front passes on to its core over HTTP, where the core says nothing, or refuses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.gateway.model_uploads import ModelUploads
from penstock.gateway.rest.app import create_app
from penstock.gateway.rest.request import TIMEOUT_HEADER
from penstock.gateway.rest.streaming import CoreRoute
from penstock.gateway.workers.core_relay import HTTP_SOCKET, CoreRelay
from tests.rest.harness import Front

REFUSAL = b'HTTP/1.1 400 Bad Request\r\ncontent-length: 22\r\n\r\n{"error":"no number."}'


@asynccontextmanager
async def before_a_core_that_says(answer: bytes, run_dir: Path) -> AsyncIterator[Front]:
    """A front before a core that takes every call and answers this, or nothing at all."""

    ended: list[asyncio.Event] = []

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await reader.read()  # until the front has gone
        writer.close()
        await writer.wait_closed()
        ended[-1].set()

    server = await asyncio.start_unix_server(say, str(run_dir / HTTP_SOCKET))
    core, front = CoreRelay(run_dir, max_connections=4), Front()
    front.app = create_app(
        front.plane,  # type: ignore[arg-type]
        front.limits,
        front.recorder,
        core_route=CoreRoute(core, has_engine=False, uploads=ModelUploads(run_dir, ())),
    )
    try:
        async with asyncio.timeout(30):
            yield front
    finally:
        await core.aclose()
        server.close()
        await asyncio.gather(*(end.wait() for end in ended))


@pytest.mark.parametrize(("method", "target"), [("GET", "/v2/models/m/stats"), ("POST", "/v2/models/m/generate")])
async def test_deadline_of_a_call_that_is_passed_on_holds_though_the_core_says_nothing(
    tmp_path: Path, method: str, target: str
) -> None:
    """The worker enforces the deadline if the core hangs."""
    async with before_a_core_that_says(b"", tmp_path) as front:
        reply = await front.ask(method, target, b"{}", [(TIMEOUT_HEADER.encode(), b"50")])
        assert (reply.status, front.recorder.reasons) == (504, ["deadline"])


async def test_timeout_that_is_no_number_is_the_cores_to_refuse(tmp_path: Path) -> None:
    """It has the words, and knows what it reads the header of."""
    async with before_a_core_that_says(REFUSAL, tmp_path) as front:
        reply = await front.ask("GET", "/v2/models/m/stats", headers=[(TIMEOUT_HEADER.encode(), b"soon")])
        assert (reply.status, reply.body) == (400, b'{"error":"no number."}')
