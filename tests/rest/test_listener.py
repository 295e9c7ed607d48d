"""The listener's end: running requests get their grace, and what outlasts it is cut with an answer."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.rest.limits import ConnectionLimits
from penstock.gateway.rest.listener import HttpListener
from penstock.network import PortTaken, bind
from penstock.tls import Certificates, TlsFiles
from tests.auth.authorities import Authority

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HALF = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf"


class Holding:
    """Reads the body, then holds the answer until it is released."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.released = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.entered.set()
        try:
            await Request(scope, receive).body()
            await self.released.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        await Response(b"done")(scope, receive, send)


@asynccontextmanager
async def listening(
    app: Holding, sent: bytes
) -> AsyncIterator[tuple[HttpListener, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A listener and a client that has sent its bytes."""
    listener = HttpListener(app, bind("127.0.0.1", 0, flag="--http-port"))
    listener.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        async with asyncio.timeout(30):
            writer.write(sent)
            await app.entered.wait()
            yield listener, reader, writer
    finally:
        await listener.stop(0.0)
        writer.close()


async def test_listener_lets_a_running_request_end_within_the_grace() -> None:
    """Its answer comes, the connection closes, and the stop is clean."""
    app = Holding()
    async with listening(app, GET) as (listener, reader, _):
        stopping = asyncio.create_task(listener.stop(5.0))
        await asyncio.sleep(0)
        app.released.set()
        assert (await reader.read()).endswith(b"done")
        assert await stopping is True


@pytest.mark.parametrize("sent", [GET, HALF], ids=["at work", "half-read body"])
async def test_listener_cuts_what_outlasts_the_grace_with_an_answer(sent: bytes) -> None:
    """503 with a sentence, the work cancelled, within the grace and a little."""
    app = Holding()
    async with listening(app, sent) as (listener, reader, _):
        started = time.monotonic()
        assert await listener.stop(0.2) is False
        assert time.monotonic() - started < 5  # the work would never end
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'{"error":"this gateway stopped before the answer came; send to another one"}' in answer
        assert b"retry-after: " in answer.lower()
        assert app.was_cancelled


async def test_listener_does_not_wait_for_connections_without_a_request() -> None:
    """Idle ones, and heads that never end, are closed at once."""
    app = Holding()
    app.entered.set()
    async with listening(app, GET[:-2]) as (listener, reader, _):
        started = time.monotonic()
        assert await listener.stop(20.0) is True
        assert time.monotonic() - started < 10
        assert await reader.read() == b""


def test_bind_where_it_cannot_says_which_flag_helps() -> None:
    """A port that is held needs another port; an address of another machine needs another address."""
    with bind("127.0.0.1", 0, flag="--http-port") as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"127\.0\.0\.1:{port} \(.*stop what holds it.* with --http-port$"):
            bind("127.0.0.1", port, flag="--http-port")
    with pytest.raises(PortTaken, match=r"203\.0\.113\.1:0 \(.*; give an address of this machine with --host$"):
        bind("203.0.113.1", 0, flag="--http-port")


def silent_clients(port: int, count: int, address: str = "127.0.0.1") -> list[socket.socket]:
    """Clients that connect and send nothing."""
    return [
        socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(address, 0)) for _ in range(count)
    ]


async def closed(client: socket.socket) -> None:
    """Returns when the server has closed the connection."""
    client.setblocking(False)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_clients_that_never_complete_their_tls_handshake_are_limited(tmp_path: Path) -> None:
    """An address may have as many handshakes as connections; the newest are refused.

    Over the total limit the oldest handshakes are dropped, so that new clients get theirs.
    """
    authority = Authority("ours")
    tls = Certificates(TlsFiles(*authority.sign(tmp_path, "server"))).context
    refused: list[str] = []
    limits = ConnectionLimits(max_connections=6, max_per_address=4)
    listener = HttpListener(
        Holding(), bind("127.0.0.1", 0, flag="--http-port"), limits=limits, refused=refused.append, tls=tls
    )
    listener.start()
    clients = silent_clients(listener.port, 7)
    try:
        async with asyncio.timeout(30):
            await asyncio.gather(*[closed(each) for each in clients[4:]])
            clients += silent_clients(listener.port, 2, "127.0.0.2")
            trusting = ssl.create_default_context(cadata=authority.pem.decode())
            _, writer = await asyncio.open_connection(
                "127.0.0.1", listener.port, ssl=trusting, local_addr=("127.0.0.3", 0)
            )
            writer.close()
            await closed(clients[0])
        assert refused == ["connections_full"] * 4
    finally:
        for each in clients:
            each.close()
        await listener.stop(0.0)


async def test_stopped_tls_listener_ends_handshakes(tmp_path: Path) -> None:
    """A client in its handshake does not delay the stop."""
    tls = Certificates(TlsFiles(*Authority("ours").sign(tmp_path, "server"))).context
    listener = HttpListener(Holding(), bind("127.0.0.1", 0, flag="--http-port"), tls=tls)
    listener.start()
    (client,) = silent_clients(listener.port, 1)
    with client:
        assert await listener.stop(5.0)
        async with asyncio.timeout(30):
            await closed(client)
