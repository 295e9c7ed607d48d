"""Connection limits: floods, slow clients, broken framing, pipelines, unread responses."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_network

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.rest.limits import ConnectionLimits
from penstock.gateway.rest.listener import HttpListener
from penstock.network import bind
from tests.rest.harness import Client

TIGHT = ConnectionLimits(
    max_connections=3,
    max_head_bytes=4096,
    max_headers=20,
    head_timeout_s=0.3,
    idle_timeout_s=0.6,
    max_pipelined=4,
    write_timeout_s=0.4,
)
ROOMY = ConnectionLimits(max_head_bytes=4096, max_headers=20, max_pipelined=4)
GET = b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /%d HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Echo:
    """Answers with its path and body, padded to size_bytes; held requests wait for release."""

    def __init__(self, size_bytes: int = 0) -> None:
        self.size_bytes = size_bytes
        self.released = asyncio.Event()
        self.entered = asyncio.Event()
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_failed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.entered.set()
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            self.has_failed = True
            return
        self.headers = list(scope["headers"])
        if scope["path"] == "/hold":
            await self.released.wait()
        answer = scope["path"].encode() + b" " + body
        await Response(answer.ljust(self.size_bytes, b"."))(scope, receive, send)


class Served:
    """A running listener, its app and the refusals that it counted."""

    def __init__(self, app: Echo, limits: ConnectionLimits) -> None:
        self.app = app
        self.admission = InFlightLimiter(InFlightLimits())
        self.refused: list[str] = []
        self.listener = HttpListener(
            app,
            bind("127.0.0.1", 0, flag="--http-port"),
            limits=limits,
            unread=self.admission,
            refused=self.refused.append,
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.listener.port


@asynccontextmanager
async def serving(limits: ConnectionLimits, size_bytes: int = 0) -> AsyncIterator[Served]:
    """A listener that serves."""
    served = Served(Echo(size_bytes), limits)
    served.listener.start()
    try:
        async with asyncio.timeout(60):
            yield served
    finally:
        await served.listener.stop(0.0)


@pytest.mark.parametrize(
    ("sent", "status", "reason"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 5000, 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 5000 + b"\r\n\r\n", 431, "head_too_large"),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 21 + b"\r\n", 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 22, 431, "head_too_large"),  # its end is not waited for
        (b"GET / HTTP/1.1\r\nx: a", 408, "head_too_slow"),
        (b"GET", 408, "head_too_slow"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\nx y: a\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400, "malformed_http"),
        (b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400, "malformed_http"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked, gzip\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\nx: a\r\n folded\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\nx: a\n\n", 400, "malformed_http"),
        (CHUNKED % 1 + b"zz\r\n", 400, "malformed_http"),
        (b"GET /\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\nhost:\r\n\r\n", 400, "malformed_http"),
        (b"GET / HTTP/1.1\r\nhost: user@localhost\r\n\r\n", 400, "malformed_http"),
        (b"GET http://b/ HTTP/1.1\r\nhost: a\r\n\r\n", 400, "malformed_http"),
    ],
)
async def test_connection_with_a_bad_head_or_framing_gets_one_answer_and_ends(
    sent: bytes, status: int, reason: str
) -> None:
    """The status, our form of errors, a word for the metric, and the end of the connection."""
    async with serving(TIGHT) as served, Client.connected(served.port) as client:
        await client.send(sent[:50])
        await asyncio.sleep(0.02)
        await client.send(sent[50:])
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (status, "close")
        assert list(json.loads(reply.body)) == ["error"]
        assert await client.reader.read() == b""
        assert served.refused == [reason]


async def test_connection_without_a_request_is_closed_after_its_time_and_not_before() -> None:
    """Silently, whether it is new, or had an answer; line ends do not prolong it.

    One that arrives while the connection closes is answered by the kernel with a reset.
    """
    async with serving(TIGHT) as served, Client.connected(served.port) as new, Client.connected(served.port) as used:
        await used.send(GET % 1)
        assert (await used.reply()).body == b"/1 "
        started = time.monotonic()

        async def dribble() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    await new.send(b"\r\n")
                    await asyncio.sleep(0.1)

        dribbling = asyncio.create_task(dribble())
        assert await asyncio.gather(new.until_closed(), used.reader.read()) == [b"", b""]
        dribbling.cancel()
        assert time.monotonic() - started > 0.5
        assert served.refused == []


async def test_connection_over_the_limit_gets_503_and_the_others_are_served() -> None:
    """503 with a time to come back, at once; a place is free again when a client leaves."""
    async with serving(ConnectionLimits(max_connections=2)) as served:
        async with Client.connected(served.port) as first:
            async with Client.connected(served.port) as second, Client.connected(served.port) as third:
                reply = await third.reply()
                assert (reply.status, reply.headers["retry-after"] in ("1", "2")) == (503, True)
                for client in (first, second):
                    await client.send(GET % 1)
                    assert (await client.reply()).status == 200
            while served.listener.connection_count > 1:
                await asyncio.sleep(0.01)
            async with Client.connected(served.port) as fourth:
                await fourth.send(GET % 4)
                assert (await fourth.reply()).body == b"/4 "
        assert served.refused == ["connections_full"]


async def test_connections_of_several_addresses_are_limited_together() -> None:
    """The port's limit applies even if no address has reached its own."""
    async with serving(ConnectionLimits(max_connections=2)) as served:
        async with (
            Client.connected(served.port) as first,
            Client.connected(served.port, address="127.0.0.2"),
            Client.connected(served.port, address="127.0.0.3") as third,
        ):
            async with asyncio.timeout(10):
                assert (await third.reply()).status == 503
            await first.send(GET % 1)
            assert (await first.reply()).status == 200
        assert served.refused == ["connections_full"]


async def test_address_over_its_limit_is_refused_and_has_room_again_when_a_client_leaves() -> None:
    """It gets 503 with the limit, although the port has room."""
    async with serving(ConnectionLimits(max_connections=20, max_per_address=2)) as served:
        async with Client.connected(served.port) as first:
            async with Client.connected(served.port), Client.connected(served.port) as third:
                reply = await third.reply()
                assert (reply.status, b"2 connections from 127.0.0.1 are open" in reply.body) == (503, True)
            while served.listener.connection_count > 1:
                await asyncio.sleep(0.01)
            async with Client.connected(served.port) as fourth:
                for client in (first, fourth):
                    await client.send(GET % 4)
                    assert (await client.reply()).body == b"/4 "
        assert served.refused == ["connections_full"]


async def test_refused_connections_of_one_address_take_no_room_from_another() -> None:
    """They stay open until their answer is read, but do not count against the port's limit."""
    async with serving(ConnectionLimits(max_connections=2, max_per_address=1)) as served, AsyncExitStack() as opened:
        flood = [await opened.enter_async_context(Client.connected(served.port)) for _ in range(4)]
        assert [(await client.reply()).status for client in flood[1:]] == [503, 503, 503]
        async with Client.connected(served.port, address="127.0.0.2") as other:
            await other.send(GET % 1)
            assert (await other.reply()).body == b"/1 "


async def test_trusted_proxy_is_limited_by_the_port_alone() -> None:
    """Its address represents many clients."""
    limits = ConnectionLimits(max_connections=3, max_per_address=1, trusted_proxies=(ip_network("127.0.0.1"),))
    async with serving(limits) as served, AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(Client.connected(served.port)) for _ in range(4)]
        assert (await clients[3].reply()).status == 503
        for client in clients[:3]:
            await client.send(GET % 3)
            assert (await client.reply()).body == b"/3 "


async def test_client_that_leaves_a_pipeline_is_seen_by_the_request_that_runs() -> None:
    """The running request gets the disconnect; the requests behind it are not started."""
    begun: list[str] = []
    is_disconnected = asyncio.Event()

    async def app(scope: Scope, receive: Receive, _: Send) -> None:
        begun.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass
        is_disconnected.set()

    listener = HttpListener(app, bind("127.0.0.1", 0, flag="--http-port"), limits=ROOMY)
    listener.start()
    _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(GET % 1 + GET % 2 + GET % 3)
    async with asyncio.timeout(30):
        while not begun:
            await asyncio.sleep(0.01)
        writer.close()
        await is_disconnected.wait()
    await listener.stop(1.0)
    assert begun == ["/1"]


async def test_pipelined_requests_are_answered_in_order_and_up_to_the_limit() -> None:
    """Four may wait behind the one that runs; the one too many ends the connection, after the others' answers."""
    async with serving(ROOMY) as served, Client.connected(served.port) as client:
        await client.send(b"".join(GET % number for number in range(5)))
        assert [(await client.reply()).body for _ in range(5)] == [b"/%d " % number for number in range(5)]
        await client.send(b"".join(GET % number for number in range(2000)))
        assert [(await client.reply()).body for _ in range(5)] == [b"/%d " % number for number in range(5)]
        assert (await client.reply()).status == 503
        assert await client.reader.read() == b""
        assert served.refused == ["pipeline_full"]


@pytest.mark.parametrize("broken", [b"bad\r\n\r\n", CHUNKED % 7 + b"zz\r\n"], ids=["head", "body"])
async def test_broken_request_in_a_pipeline_does_not_touch_the_answers_before_it(broken: bytes) -> None:
    """The error comes last, never into the middle of another answer."""
    async with serving(ROOMY) as served, Client.connected(served.port) as client:
        await client.send(b"GET /hold HTTP/1.1\r\nhost: x\r\n\r\n" + GET % 2 + broken)
        await served.app.entered.wait()
        served.app.released.set()
        assert [(await client.reply()).body for _ in range(2)] == [b"/hold ", b"/2 "]
        assert (await client.reply()).status == 400
        assert await client.reader.read() == b""
        assert served.refused == ["malformed_http"]


async def test_broken_chunk_ends_the_request_that_waits_for_its_body() -> None:
    """400 at once, and the app gets a disconnect."""
    async with serving(ROOMY) as served, Client.connected(served.port) as client:
        await client.send(CHUNKED % 1 + b"3\r\nabc\r\n")
        await served.app.entered.wait()
        await client.send(b"nonsense\r\n")
        assert (await client.reply()).status == 400
        while not served.app.has_failed:
            await asyncio.sleep(0.01)


async def test_trailers_of_a_body_do_not_become_headers() -> None:
    """What follows the last chunk is read and forgotten; the connection serves on."""
    async with serving(ROOMY) as served, Client.connected(served.port) as client:
        await client.send(CHUNKED % 1 + b"1\r\na\r\n")
        await client.send(b"0\r\ncontent-encoding: gzip\r\nx-late: 1\r\n\r\n")
        assert (await client.reply()).body == b"/1 a"
        assert [name for name, _ in served.app.headers] == [b"host", b"transfer-encoding"]
        await client.send(GET % 2)
        assert (await client.reply()).body == b"/2 "


@pytest.mark.parametrize(
    "endless", [b"0\r\n" + b"x: a\r\n" * 999, b"1;x=" + b"a" * 5000], ids=["trailers", "extension"]
)
async def test_framing_without_end_is_refused(endless: bytes) -> None:
    """Trailers and chunk extensions are bounded as heads are."""
    async with serving(ROOMY) as served, Client.connected(served.port) as client:
        await client.send(CHUNKED % 1 + b"1\r\na\r\n")
        await served.app.entered.wait()
        await client.send(endless)
        reply = await client.reply()
        assert (reply.status, served.refused) == (400, ["chunk_framing"])


@pytest.mark.parametrize("path", [b"1", b"hold"])
async def test_body_of_tiny_chunks_is_refused_after_few_of_them(path: bytes) -> None:
    """Otherwise a read of 256 KiB would be 43,000 callbacks, during which no other client is served."""
    async with serving(ROOMY) as served, Client.connected(served.port) as client:
        await client.send(CHUNKED.replace(b"%d", path) + b"1\r\nx\r\n" * 500)
        reply = await client.reply()
        assert (reply.status, served.refused) == (400, ["chunk_framing"])


async def test_small_chunks_with_enough_content_are_served() -> None:
    """The average size counts, and a few small chunks are always accepted."""
    async with serving(ROOMY) as served, Client.connected(served.port) as client:
        await client.send(CHUNKED % 1 + (b"1\r\nx\r\n" * 6 + b"100\r\n" + b"y" * 256 + b"\r\n") * 200 + b"0\r\n\r\n")
        assert (await client.reply()).body == b"/1 " + (b"x" * 6 + b"y" * 256) * 200
        await client.send(CHUNKED % 2 + b"1\r\nx\r\n" * 100 + b"0\r\n\r\n")
        assert (await client.reply()).body == b"/2 " + b"x" * 100
        assert served.refused == []


async def test_offer_to_upgrade_is_declined_by_serving_on() -> None:
    """`Upgrade: h2c`, as curl --http2 and Java's client send it: HTTP/1.1 answers, with and without a body."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    async with serving(ROOMY) as served, Client.connected(served.port) as client:
        for number in range(2):
            await client.send(b"GET /%d HTTP/1.1\r\nhost: x\r\n" % number + offer + b"\r\n")
            assert (await client.reply()).body == b"/%d " % number
            await client.send(b"POST /%d HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n" % number + offer + b"\r\nabc")
            assert (await client.reply()).body == b"/%d abc" % number
        await client.send(CHUNKED[:-2] % 3 + offer + b"\r\n2\r\nab\r\n")
        await client.send(b"1\r\nc\r\n0\r\n\r\n" + GET % 4)
        assert [(await client.reply()).body for _ in range(2)] == [b"/3 abc", b"/4 "]


async def test_reader_that_stops_is_cut_and_its_answer_counted_until_then() -> None:
    """Unread bytes count against admission until the connection is closed; other clients are served."""
    size_bytes = 16 << 20
    async with serving(TIGHT, size_bytes) as served:
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stuck, ("127.0.0.1", served.port))
        await loop.sock_sendall(stuck, GET % 1)
        while not served.admission.statistics().size_bytes:
            await asyncio.sleep(0.01)
        assert served.admission.statistics().size_bytes > size_bytes / 4
        async with Client.connected(served.port) as client:
            await client.send(GET % 2)
            assert len((await client.reply()).body) == size_bytes
        while served.listener.connection_count:
            await asyncio.sleep(0.01)
        assert served.refused == ["slow_reader"]
        assert served.admission.statistics().size_bytes == 0
        stuck.close()


async def test_reader_that_is_slow_but_goes_on_gets_the_whole_answer() -> None:
    """Many times the write timeout passes; what counts is that the client reads."""
    size_bytes = 8 << 20
    async with serving(TIGHT, size_bytes) as served, Client.connected(served.port) as client:
        await client.send(GET % 1)
        await client.reader.readuntil(b"\r\n\r\n")
        read = 0
        while read < size_bytes:
            read += len(await client.reader.read(256 << 10))
            await asyncio.sleep(0.05)
        assert read == size_bytes
        assert served.refused == []
