"""Bodies over a real socket: limits, deadlines, compression."""

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace

import pytest

from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.rest import infer
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.request import decompressed
from penstock.protocol.errors import InvalidRequest, NotSupported, TooLarge
from tests.rest.harness import VALID_INFER, Client, Front, request_bytes

SMALL = RestOptions(max_body_bytes=1 << 16)
HASTY = replace(SMALL, body_timeout_s=0.3)
INFER = "/v2/models/ident/infer"
HEAD = b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: test\r\n"


@contextmanager
def memory_within(limit_bytes: int) -> Iterator[None]:
    """Fails if the block used more memory at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


async def test_body_declared_over_the_limit_is_refused_unread() -> None:
    """Content-Length says 10 GB: 413 before a byte of it comes, and the connection closes."""
    front = Front(limits=SMALL)
    async with front.served() as port, Client.connected(port) as client:
        await client.send(HEAD + b"Content-Length: 10000000000\r\n\r\n")
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert reply.body == b'{"error":"the body has 10000000000 bytes (limit 65536); send less at once"}'
    assert front.plane.relayed == []
    assert front.recorder.reasons == ["too_large"]
    assert front.recorder.done == [("ident", "http", "413")]


async def test_body_over_the_limit_that_is_sent_all_the_same_gets_its_answer() -> None:
    """A client that writes everything before it reads finds the 413, not a reset connection."""
    front = Front(limits=SMALL)
    async with front.served() as port, Client.connected(port) as client:
        await client.send(request_bytes("POST", INFER, bytes(8 << 20)))
        assert (await client.reply()).status == 413
        assert await client.reader.read() == b""


async def test_body_in_many_small_chunks_is_refused_at_the_limit() -> None:
    """Chunked bodies have no length to look at: 413 when the limit is passed, memory bounded by it."""
    front = Front(limits=SMALL)
    async with front.served() as port, Client.connected(port) as client:
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        with memory_within(4 << 20):
            for _ in range(8):
                await client.send((b"40\r\n" + bytes(64) + b"\r\n") * (1 << 8))
            assert (await client.reply()).status == 413


async def test_body_in_chunks_within_the_limit_is_relayed_whole() -> None:
    """Chunks are put together; the relay gets bytes, without the framing headers."""
    front = Front(limits=SMALL)
    async with front.served() as port, Client.connected(port) as client:
        await client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for byte in VALID_INFER:
            await client.send(b"1\r\n%c\r\n" % byte)
        await client.send(b"0\r\n\r\n")
        assert (await client.reply()).status == 200
    call = front.plane.relayed[0][2]
    assert call.body == VALID_INFER
    assert call.headers == ()


async def test_body_that_does_not_arrive_in_its_time_is_refused() -> None:
    """The deadline is absolute: bytes that dribble in do not prolong it."""
    front = Front(limits=HASTY)
    async with front.served() as port, Client.connected(port) as client:
        await client.send(HEAD + b"Content-Length: 1000\r\n\r\n")

        async def dribble() -> None:
            while True:
                await client.send(b"a")
                await asyncio.sleep(0.01)

        dribbling = asyncio.create_task(dribble())
        reply = await asyncio.wait_for(client.reply(), 5)
        dribbling.cancel()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert b"within 0.3 s" in reply.body
    assert front.recorder.reasons == ["body_too_slow"]


async def test_body_cut_by_a_disconnect_is_dropped_quietly() -> None:
    """No answer, no relayed call, no error: one cancelled request."""
    front = Front(limits=SMALL)
    async with front.served() as port:
        async with Client.connected(port) as client:
            await client.send(HEAD + b"Content-Length: 1000\r\n\r\nhalf")
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", INFER, VALID_INFER))
            assert (await client.reply()).status == 200
    assert front.recorder.cancelled_count == 1
    assert front.recorder.done == [("ident", "http", "200")]
    assert len(front.plane.relayed) == 1


async def test_connection_after_an_answer_stays_open_when_the_body_was_read() -> None:
    """Refusals close the connection only if the body was not read."""
    front = Front(limits=SMALL)
    async with front.served() as port, Client.connected(port) as client:
        for body, status in ((b"{", 400), (VALID_INFER, 200), (b"[]", 400)):
            await client.send(request_bytes("POST", INFER, body))
            reply = await client.reply()
            assert (reply.status, "connection" in reply.headers) == (status, False)


async def test_100_continue_is_sent_only_if_the_body_is_read() -> None:
    """Expect: 100-continue with a body over the limit gets the 413 first."""
    front = Front(limits=SMALL)
    async with front.served() as port, Client.connected(port) as client:
        await client.send(HEAD + b"Expect: 100-continue\r\nContent-Length: 70000\r\n\r\n")
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        (b"gzip", gzip.compress(VALID_INFER, mtime=0)),
        (b"deflate", zlib.compress(VALID_INFER)),
        (b"GZIP", gzip.compress(VALID_INFER, mtime=0)),
    ],
)
async def test_compressed_body_is_scanned_plain_and_relayed_as_it_came(
    front: Front, encoding: bytes, packed: bytes
) -> None:
    """Inference-Header-Content-Length counts the JSON before compression; the relay gets the compressed bytes."""
    length = b"%d" % len(VALID_INFER)
    headers = ((b"content-encoding", encoding), (b"inference-header-content-length", length))
    assert (await front.ask("POST", INFER, packed, headers)).status == 200
    call = front.plane.relayed[0][2]
    assert call.body == packed
    assert call.headers == headers


async def test_compressed_body_over_the_limit_is_refused_with_bounded_memory() -> None:
    """A bomb of 64 MiB in 64 KiB: 413, and never more than about the limit in memory."""
    bomb = gzip.compress(bytes(64 << 20))
    with memory_within(4 << 20), pytest.raises(TooLarge, match="once decompressed"):
        await decompressed(bomb, "gzip", 1 << 20)


@pytest.mark.parametrize(
    ("body", "encoding", "expected"),
    [
        (b"junk", "gzip", InvalidRequest),
        (gzip.compress(b"abc", mtime=0)[:-9], "gzip", InvalidRequest),
        (gzip.compress(b"abc", mtime=0) + b"more", "gzip", InvalidRequest),
        (b"", "deflate", InvalidRequest),
        (b"abc", "br", NotSupported),
    ],
)
async def test_compressed_body_that_is_broken_is_refused(body: bytes, encoding: str, expected: type[Exception]) -> None:
    """Broken, cut, followed by more, or of an encoding that is not taken."""
    with pytest.raises(expected):
        await decompressed(body, encoding, 1000)


async def test_large_compressed_bodies_of_one_client_let_another_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB can hold 64 MiB, so clients take turns: one of five waiting bodies is read before the other client's."""
    bodies = [gzip.compress(VALID_INFER + b" " * (infer.SMALL_BYTES + i), mtime=0) for i in range(6)]
    order: list[int] = []
    arrived: asyncio.Queue[None] = asyncio.Queue()
    all_sent = asyncio.Event()

    async def noted(body: bytes, encoding: str, limit_bytes: int) -> bytes:
        if limit_bytes == infer.SMALL_BYTES:
            arrived.put_nowait(None)
        else:
            order.append(bodies.index(body))
            await all_sent.wait()
        return await decompressed(body, encoding, limit_bytes)

    monkeypatch.setattr(infer, "decompressed", noted)
    monkeypatch.setattr(infer, "INFLATED_AT_ONCE", 1)
    async with Front().served() as port, AsyncExitStack() as clients:
        waiting = []
        for body in bodies:
            address = "127.0.0.2" if body is bodies[-1] else "127.0.0.1"
            client = await clients.enter_async_context(Client.connected(port, address=address))
            await client.send(request_bytes("POST", INFER, body, ((b"content-encoding", b"gzip"),)))
            await arrived.get()
            waiting.append(client)
        all_sent.set()
        assert [(await client.reply()).status for client in waiting] == [200] * len(bodies)
    assert order == [0, 1, 5, 2, 3, 4]


async def test_compressed_body_of_exactly_the_limit_is_taken() -> None:
    """The limit itself is within."""
    assert await decompressed(gzip.compress(bytes(100_000)), "gzip", 100_000) == bytes(100_000)
    assert await decompressed(b"abc", "identity", 1) == b"abc"


async def test_bodies_on_their_way_are_bounded_together_and_small_requests_still_come_in() -> None:
    """Slow uploads over the bound get 503 with a time to come back; leaving frees what they had sent."""
    front = Front()
    front.plane.admission = InFlightLimiter(InFlightLimits(max_requests=9, max_bytes=100_000))
    async with front.served() as port:
        async with Client.connected(port) as first, Client.connected(port) as second:
            for client in (first, second):
                await client.send(HEAD + b"Content-Length: 200000\r\n\r\n" + bytes(60_000))
            refused = await asyncio.wait_for(
                asyncio.wait(
                    {asyncio.ensure_future(c.reply()) for c in (first, second)}, return_when=asyncio.FIRST_COMPLETED
                ),
                5,
            )
            reply = refused[0].pop().result()
            assert (reply.status, reply.headers["connection"]) == (503, "close")
            assert reply.headers["retry-after"] in ("1", "2")
            assert front.plane.admission.statistics().receiving_bytes == 60_000
            async with Client.connected(port) as third:
                await third.send(request_bytes("POST", INFER, VALID_INFER))
                assert (await third.reply()).status == 200
            for task in refused[1]:
                task.cancel()
        async with asyncio.timeout(60):
            while front.plane.admission.statistics().receiving_bytes:
                await asyncio.sleep(0.01)
    assert front.recorder.reasons == ["full"]
