"""A model to pull, and a web server that serves it well or badly."""

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from server.catalogue.catalogue import CatalogueEntry

CONTENT = random.Random(0).randbytes(700_001)


@dataclass
class ModelServer:
    """Serves `content` at every path. The fields are what a test changes and looks at."""

    url: str = ""
    content: bytes = CONTENT
    has_ranges: bool = True
    breaks_after: int | None = None  # bytes of the body, then the connection is cut
    status: int = 200
    requests: list[str] = field(default_factory=list)  # the Range of each, or ""
    hold: threading.Event | None = None  # waited for where the connection would be cut; then the rest is sent
    is_holding: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: ModelServer

    def do_GET(self) -> None:
        server = self.behaviour
        wanted = self.headers.get("Range", "")
        server.requests.append(wanted)
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.has_ranges else 0
        if begin >= len(server.content):
            self.send_error(416)
            return
        body = server.content[begin:]
        self.send_response(206 if begin else server.status)
        self.send_header("Content-Length", str(len(body)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(server.content) - 1}/{len(server.content)}")
        self.end_headers()
        if server.breaks_after is None:
            self.wfile.write(body)
            return
        self.wfile.write(body[: server.breaks_after])
        if server.hold is None:
            self.close_connection = True
            return
        server.is_holding.set()
        server.hold.wait(30)
        with suppress(ConnectionError):  # the other side may have been killed meanwhile
            self.wfile.write(body[server.breaks_after :])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def model_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    """A running server of CONTENT, reached without any proxy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    behaviour = ModelServer()
    handler = type("Handler", (_Handler,), {"behaviour": behaviour})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    behaviour.url = f"http://127.0.0.1:{server.server_address[1]}/weights/FastestDet.onnx"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield behaviour
    if behaviour.hold is not None:
        behaviour.hold.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def entry(model_server: ModelServer) -> CatalogueEntry:
    """fastestdet, its file replaced by CONTENT at the model server."""
    return entry_of(model_server.url)


def entry_of(url: str) -> CatalogueEntry:
    """fastestdet with CONTENT as its file."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    return CatalogueEntry("fastestdet", "a test's model", url, len(CONTENT), digest, "BSD-3-Clause")
