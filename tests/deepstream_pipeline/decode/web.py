"""A small web server on loopback: files, playlists, refusals, silence."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """pages: by path, the bytes that are answered. asked: the paths that were asked for. done: end what hangs."""

    port: int = 0
    pages: dict[str, bytes] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str, credentials: str = "") -> str:
        """Of a page."""
        return f"http://{credentials}127.0.0.1:{self.port}{path}"


@contextmanager
def web() -> Iterator[Web]:
    """Answers /status/NNN with that status, /silent with nothing, /stops with a part, pages with what they hold."""
    site = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            site.asked.append(self.path)
            path = self.path.partition("?")[0]
            if path in site.redirects:
                return self._head(302, {"Location": site.redirects[path]})
            if path.startswith("/status/"):
                return self._head(int(path[8:]), {"WWW-Authenticate": 'Basic realm="x"'})
            if path == "/silent":
                site.done.wait(20)
                return None
            if path.removesuffix("/stops") not in site.pages:
                return self._head(404, {})
            content = site.pages[path.removesuffix("/stops")]
            kind = site.kinds.get(path, "application/octet-stream")
            is_endless = kind.startswith("multipart/")
            length = {} if is_endless else {"Content-Length": str(len(content))}
            self._head(200, {"Content-Type": kind, "Connection": "close"} | length)
            if path.endswith("/stops"):
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                site.done.wait(20)
                return None
            self.wfile.write(content)
            return None

        def _head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is reported."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients may hang up
    site.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.done.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
