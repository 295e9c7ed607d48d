"""Answers in pieces from the engine's HTTP port: as they come, bounded, and every way in which they can end."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton.http_client import TritonHttpClient, parse_engine_url
from penstock.protocol.call import HttpCall
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, EngineUnavailable

CALL = HttpCall("POST", b"/v2/models/words/generate_stream", (), b"{}")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
MOST_BYTES = 64 << 20

Answer = Callable[["Engine", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Engine:
    """What a streaming engine saw. go: what its answer waits for. gone: set when a connection has ended."""

    connections: int = 0
    requests: int = 0
    sent_bytes: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)


def chunk(data: bytes) -> bytes:
    """One piece as it stands on the wire."""
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def streaming(answer: Answer, **timeouts: float) -> AsyncIterator[tuple[Engine, TritonHttpClient]]:
    """An engine that answers every request so, and a client of it with one connection."""
    engine = Engine()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n{}"):
                engine.requests += 1
                await answer(engine, writer)
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            engine.gone.set()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = TritonHttpClient(parse_engine_url(url), max_connections=1, timeouts=CallTimeouts(**timeouts))
    try:
        yield engine, client
    finally:
        engine.go.set()
        await client.aclose()
        server.close()


async def in_two(engine: Engine, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(b"one"))
    await engine.go.wait()
    writer.write(chunk(b"two") + LAST)
    await writer.drain()


async def half(engine: Engine, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(b"one"))
    await engine.go.wait()
    writer.close()


async def nonsense(engine: Engine, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(b"one"))
    await engine.go.wait()
    writer.write(b"this is no chunk\r\n")


async def endless(engine: Engine, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    while engine.sent_bytes < MOST_BYTES:
        writer.write(chunk(b"x" * 65_536))
        await writer.drain()
        engine.sent_bytes += 65_536
    writer.write(LAST)


async def silent(engine: Engine, _: asyncio.StreamWriter) -> None:
    await engine.go.wait()


async def test_stream_gives_each_piece_when_it_comes() -> None:
    """The head and the first piece are there while the engine still works; its connection serves the next call."""
    async with streaming(in_two) as (engine, client):
        for _ in range(2):
            engine.go.clear()
            stream = await client.stream(CALL, deadline=time.monotonic() + 10)
            assert (stream.status, stream.headers) == (200, ((b"content-type", b"text/event-stream"),))
            assert await anext(stream.chunks) == b"one"
            engine.go.set()
            assert [piece async for piece in stream.chunks] == [b"two"]
        assert (engine.connections, engine.requests) == (1, 2)


async def test_stream_holds_the_engine_back_while_it_is_not_read() -> None:
    """The engine can send no more than the buffers on the way hold; then all of it arrives."""
    async with streaming(endless) as (engine, client):
        stream = await client.stream(CALL, deadline=time.monotonic() + 60)
        before = -1
        while engine.sent_bytes != before:
            before = engine.sent_bytes
            await asyncio.sleep(0.2)
        assert before < MOST_BYTES / 2
        assert sum([len(piece) async for piece in stream.chunks]) == MOST_BYTES


async def test_stream_closed_early_ends_the_engines_work() -> None:
    """The engine sees its connection end, the slot is free again, and the next call gets it."""
    async with streaming(in_two) as (engine, client):
        stream = await client.stream(CALL, deadline=None)
        waiting = asyncio.create_task(client.stream(CALL, deadline=time.monotonic() + 10))
        assert await anext(stream.chunks) == b"one"
        await stream.chunks.aclose()
        engine.go.set()
        second = await waiting
        assert [piece async for piece in second.chunks] == [b"one", b"two"]
        await engine.gone.wait()
        assert engine.connections == 2


async def test_stream_that_was_never_read_gives_its_connection_back() -> None:
    """Closing it is enough."""
    async with streaming(in_two) as (engine, client):
        stream = await client.stream(CALL, deadline=None)
        await stream.chunks.aclose()
        engine.go.set()
        await engine.gone.wait()
        assert (await client.stream(CALL, deadline=time.monotonic() + 10)).status == 200


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [(half, EngineUnavailable, "connection to the engine broke"), (nonsense, EngineFailed, "cannot be read")],
    ids=["it dies", "it sends nonsense"],
)
async def test_stream_that_breaks_tells_it_after_what_came(answer: Answer, error: type[Exception], said: str) -> None:
    """What arrived is given first; then the reason; and the connection is not used again."""
    async with streaming(answer) as (engine, client):
        stream = await client.stream(CALL, deadline=None)
        assert await anext(stream.chunks) == b"one"
        engine.go.set()
        with pytest.raises(error, match=said):
            await anext(stream.chunks)
        assert (await client.stream(CALL, deadline=time.monotonic() + 10)).status == 200
        assert engine.connections == 2


async def test_stream_keeps_its_deadline_before_and_after_the_head() -> None:
    """DeadlineExceeded, and the connection goes."""
    async with streaming(silent) as (engine, client):
        with pytest.raises(DeadlineExceeded):
            await client.stream(CALL, deadline=time.monotonic() + 0.1)
        engine.go.set()
        await engine.gone.wait()
    async with streaming(in_two) as (engine, client):
        stream = await client.stream(CALL, deadline=time.monotonic() + 0.3)
        with pytest.raises(DeadlineExceeded):
            assert [piece async for piece in stream.chunks] == [b"one"]
        engine.go.set()
        await engine.gone.wait()


async def test_stream_without_a_deadline_has_a_timeout_for_each_piece() -> None:
    """A silent engine is not waited for for ever."""
    async with streaming(in_two, call_s=0.2) as (_, client):
        stream = await client.stream(CALL, deadline=None)
        assert await anext(stream.chunks) == b"one"
        with pytest.raises(DeadlineExceeded):
            await anext(stream.chunks)


async def test_stream_cancelled_before_its_head_frees_the_connection() -> None:
    """The slot is given back, and the engine sees a closed connection."""
    async with streaming(silent) as (engine, client):
        waiting = asyncio.create_task(client.stream(CALL, deadline=None))
        while not engine.requests:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engine.go.set()
        await engine.gone.wait()
        assert not client._slots.locked()
