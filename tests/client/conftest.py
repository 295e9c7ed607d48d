"""Fixtures of the client's tests: a fake gateway, clients of it, and servers that send raw bytes."""

import asyncio
import contextvars
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from penstock import AsyncClient, Client
from tests.cli.conftest import StandIn, jpeg
from tests.cli.conftest import stand_in as stand_in

PICTURE = jpeg()
Serve = Callable[[socket.socket], None]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes PENSTOCK_ variables from the environment."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def client(stand_in: StandIn) -> Iterator[Client]:
    """A client of the fake gateway, without retries."""
    with Client(stand_in.url, api_key="", retries=0) as made:
        yield made


@contextmanager
def raw_server(serve: Serve) -> Iterator[str]:
    """The URL of a server that calls `serve` with each connection, in a new thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=_served, args=(serve, connection), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in connections:
            connection.close()
        thread.join(5.0)


def _served(serve: Serve, connection: socket.socket) -> None:
    with suppress(OSError):
        serve(connection)


def read_request(connection: socket.socket) -> bytes:
    """Head and body of one request; empty if the client has closed the connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        if not (chunk := connection.recv(65536)):
            return b""
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    missing = (int(lengths[0].partition(b":")[2]) if lengths else 0) - len(body)
    while missing > 0:
        missing -= len(connection.recv(65536))
    return head


def answer_with(*answers: bytes) -> Serve:
    """Sends one of these responses per request, in order over all connections; then closes.

    After an empty answer the connection is closed, too.
    """
    left = list(answers)

    def serve(connection: socket.socket) -> None:
        with connection:
            while read_request(connection) and left:
                answer = left.pop(0)
                connection.sendall(answer)
                if not answer or not left:
                    return

    return serve


def http_answer(status: int, body: bytes, *headers: str) -> bytes:
    """A response as bytes."""
    lines = [f"HTTP/1.1 {status} Status", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


class BlockingAsyncClient:
    """AsyncClient with Client's synchronous interface, so that each test runs for both."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return method if name == "deadline" else lambda *words, **options: self._run(method(*words, **options))

    def __enter__(self) -> "BlockingAsyncClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._client.aclose())
        self._runner.close()

    def _run(self, work: Any) -> Any:
        return self._runner.run(work, context=contextvars.copy_context())


Make = Callable[..., Any]


@pytest.fixture(params=[Client, BlockingAsyncClient])
def make(request: pytest.FixtureRequest) -> Make:
    """The constructor of Client, then of AsyncClient."""
    kind: Make = request.param
    return kind


@contextmanager
def client_of(make: Make, *answers: bytes, api_key: str = "") -> Iterator[Any]:
    """A client, without retries, of a server that sends these responses in order."""
    with raw_server(answer_with(*answers)) as url, make(url, api_key=api_key, retries=0) as made:
        yield made
