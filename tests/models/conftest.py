"""A model to pull, and a web server that serves it well or badly."""

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import pytest

from penstock.models.catalogue import CatalogueEntry
from tests.support.web_server import serving

CONTENT = random.Random(0).randbytes(700_001)


@dataclass
class ModelServer:
    """Serves `content` at every path. The fields are what a test changes and looks at."""

    url: str = ""
    content: bytes = CONTENT
    has_ranges: bool = True
    breaks_after: int | None = None  # bytes of the body, then the connection is cut
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)  # of the answer, beside or instead of the usual ones
    redirects: dict[str, str] = field(default_factory=dict)  # path to where
    is_chunked: bool = False
    is_without_length: bool = False
    cuts_head: bool = False  # the connection ends before the answer begins
    dribbles: str = ""  # "head" or "body": a byte every 20 ms, for ever
    requests: list[str] = field(default_factory=list)  # the Range of each, or ""
    paths: list[str] = field(default_factory=list)
    hold: threading.Event | None = None  # waited for where the connection would be cut; then the rest is sent
    is_holding: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: ModelServer

    def do_GET(self) -> None:
        with suppress(ConnectionError):  # the other side may have gone, or been killed
            self._answer(self.behaviour)

    def _answer(self, server: ModelServer) -> None:
        wanted = self.headers.get("Range", "")
        server.requests.append(wanted)
        server.paths.append(self.path)
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.has_ranges else 0
        if server.cuts_head:
            self.close_connection = True
            return
        if server.dribbles == "head":
            self._dribble(b"HTTP/1.1 200 OK\r\nX-Header: ")
            return
        if begin >= len(server.content):
            self.send_error(416)
            return
        self._send_head(server, begin)
        self._send_body(server, server.content[begin:])

    def _send_head(self, server: ModelServer, begin: int) -> None:
        headers = {"Content-Length": str(len(server.content) - begin)}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(server.content) - 1}/{len(server.content)}"
        if server.is_chunked or server.is_without_length:
            headers = {"Transfer-Encoding": "chunked"} if server.is_chunked else {"Connection": "close"}
        to = server.redirects.get(self.path)
        self.send_response(302 if to else 206 if begin else server.status)
        for name, value in {**headers, **server.headers, **({"Location": to} if to else {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_body(self, server: ModelServer, body: bytes) -> None:
        if server.dribbles == "body":
            self._dribble(b"")
        elif server.is_chunked:
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        elif server.breaks_after is None:
            self.wfile.write(body)
            self.close_connection |= server.is_without_length
        else:
            self.wfile.write(body[: server.breaks_after])
            if server.hold is None:
                self.close_connection = True
                return
            server.is_holding.set()
            server.hold.wait(30)
            self.wfile.write(body[server.breaks_after :])

    def _dribble(self, begin: bytes) -> None:
        self.wfile.write(begin)
        while not self.behaviour.is_over.wait(0.02):
            self.wfile.write(b"x")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def handler_of(behaviour: ModelServer) -> type[BaseHTTPRequestHandler]:
    """What answers requests so."""
    return type("Handler", (_Handler,), {"behaviour": behaviour})


@pytest.fixture
def model_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    """A running server of CONTENT, reached without any proxy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    behaviour = ModelServer()
    with serving(handler_of(behaviour)) as address:
        behaviour.url = f"{address}/weights/FastestDet.onnx"
        yield behaviour
        behaviour.is_over.set()
        if behaviour.hold is not None:
            behaviour.hold.set()


@pytest.fixture
def entry(model_server: ModelServer) -> CatalogueEntry:
    """fastestdet, its file replaced by CONTENT at the model server."""
    return entry_of(model_server.url)


def entry_of(url: str) -> CatalogueEntry:
    """fastestdet with CONTENT as its file."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    return CatalogueEntry("fastestdet", "a test's model", url, len(CONTENT), digest, "BSD-3-Clause")
