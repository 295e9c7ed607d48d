"""The HTTP server of the control API: uvicorn in its own thread, with deadlines and limits for each connection."""

import asyncio
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.port_policy import PortLimits
from penstock.tls import CurrentTls, TlsAcceptor
from penstock_video.api.app import ApiApp, create_app
from penstock_video.api.options import CERTIFICATE, ApiOptions, ApiRefused, listeners_of
from penstock_video.interfaces import PipelineControl, Previews
from penstock_video.metrics import CONTENT_TYPE
from penstock_video.store.reader import EventArchive

MAX_HEAD_BYTES = 64 * 1024
LEAST_CHUNK_BYTES = 32  # average of the chunks in a read, not counting the first 2,048
_MAX_CHUNK_DEBT_BYTES = 64 * 1024
_quiet = logging.getLogger("penstock.video.api")  # clients' faults are answered, not logged
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


class BoundedConnection(HttpToolsProtocol):
    """One client's connection. client_timeout_s: for the head, the body, and for the client to read what was
    written."""

    def __init__(self, *, client_timeout_s: float, max_connections: int, **given: Any) -> None:
        super().__init__(**given)
        self.logger = _quiet
        self._timeout_s, self._max_connections = client_timeout_s, max_connections
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._head_bytes = 0
        self._is_further_chunk = False
        self._chunk_debt_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse("503 Service Unavailable", f"{self._max_connections} connections are open, the limit")
            return
        self._await_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._request_timer)
        self._stop(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._is_further_chunk = False
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse("431 Request Header Fields Too Large", f"a head has at most {MAX_HEAD_BYTES} bytes")
        elif self._request_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_client()  # empty lines before a head, which begin no message

    def on_message_begin(self) -> None:
        super().on_message_begin()
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        if tls is not None and (certificate := tls.getpeercert(binary_form=True)):
            cast(dict[str, Any], self.scope)[CERTIFICATE] = certificate
        self._is_in_head, self._head_bytes = True, 0
        self._await_client()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._chunk_debt_bytes = False, 0
        super().on_headers_complete()
        self._await_client()

    def on_body(self, body: bytes) -> None:
        """Called for each chunk; refuses a body of tiny chunks."""
        if self._is_further_chunk:
            self._chunk_debt_bytes = max(0, self._chunk_debt_bytes + LEAST_CHUNK_BYTES - len(body))
            if self._chunk_debt_bytes > _MAX_CHUNK_DEBT_BYTES:
                raise ValueError("the body's chunks are too small")  # ends the parser with 400
        self._is_further_chunk = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop(self._request_timer)
        self._request_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", "the request is not valid HTTP/1.1")

    def _await_client(self) -> None:
        self._stop(self._request_timer)
        self._request_timer = self.loop.call_later(self._timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        if self._is_in_head:
            self.transport.abort()
            return
        self._refuse("408 Request Timeout", f"the request did not arrive within {self._timeout_s:g} s")

    def _refuse(self, status: str, text: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps({"error": text}).encode()
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._stop(self._write_timer)
        self._write_timer = self.loop.call_later(1.0, self.transport.abort)  # who does not read that is cut

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


log = structlog.get_logger(component="video")

_KEEP_ALIVE_S = 15
_START_TIMEOUT_S = 30.0


class Page(Protocol):
    """Source of the metrics page."""

    def page(self) -> bytes: ...


class ApiServer:
    """Serves from `start` until `stop`. Calls of the pipeline run on the API's own threads."""

    def __init__(
        self,
        control: PipelineControl,
        previews: Previews,
        metrics: Page,
        options: ApiOptions,
        archive: EventArchive | None = None,
    ) -> None:
        """archive: None without a store of events."""
        self._options = options
        self._api: ApiApp = create_app(control, previews, metrics.page, options, CONTENT_TYPE, archive)
        self._listeners: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The URL that it listens on, http:// or https://. Available after `start`."""
        if not self._listeners:
            raise RuntimeError("the control API was not started")
        return self._url

    def start(self) -> None:
        """Returns when it serves. Raises ApiRefused if the address cannot be bound."""
        host = self._options.host
        self._listeners = listeners_of(self._options)
        port = int(self._listeners[0].getsockname()[1])
        scheme = "http" if self._options.tls is None else "https"
        self._url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._server = _Server(_config(self._api, self._options), self._options)
        self._thread = threading.Thread(target=self._serve, name="api", daemon=True)
        self._thread.start()
        if not self._server.is_up.wait(_START_TIMEOUT_S):
            raise ApiRefused(f"the control API did not start within {_START_TIMEOUT_S:g} s")
        log.debug("api_ready", url=self._url)  # the command says it to people

    def stop(self, timeout_s: float) -> None:
        """Stops accepting, lets running requests end within the time, closes the others. Ends moving previews at
        once."""
        loop, thread, server = self._loop, self._thread, self._server
        if loop is None or thread is None or server is None:
            return
        try:
            loop.call_soon_threadsafe(self._begin_stop, server, timeout_s)
        except RuntimeError:  # it ended by itself
            log.warning("api_was_down", reason="internal")
        thread.join(timeout_s + 5.0)
        self._thread = None
        if thread.is_alive():
            log.error("api_stuck", reason="internal", timeout_s=timeout_s)

    def _begin_stop(self, server: "_Server", timeout_s: float) -> None:
        self._api.close()
        server.should_exit = True
        asyncio.get_running_loop().call_later(timeout_s, server.cut)

    def _serve(self) -> None:
        assert self._server is not None
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve_until_stopped(self._server))
        except Exception:  # the thread's root
            log.exception("api_failed", reason="internal")
        finally:
            for listener in self._listeners:
                listener.close()

    async def _serve_until_stopped(self, server: "_Server") -> None:
        access = self._options.access
        reloading = asyncio.create_task(access.run()) if access is not None else None
        try:
            await server.serve(sockets=self._listeners)
        finally:
            if reloading is not None:
                reloading.cancel()


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it serves, and can close connections."""

    def __init__(self, config: uvicorn.Config, options: ApiOptions) -> None:
        super().__init__(config)
        self._options = options
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tls = self._options.tls
        if tls is None or sockets is None:
            await super().startup(sockets=sockets)
        else:
            acceptors = [self._acceptor(each, tls) for each in sockets]
            self.servers = cast("list[asyncio.base_events.Server]", acceptors)
            self.started = True
        self.is_up.set()

    def _acceptor(self, listener: socket.socket, tls: CurrentTls) -> TlsAcceptor:
        made = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        protocol = partial(made, config=self.config, server_state=self.server_state, app_state={})
        most = self._options.max_connections
        return TlsAcceptor(
            listener,
            tls,
            protocol,
            limits=PortLimits(most, max(1, most // 2)),
            handshake_timeout_s=self._options.client_timeout_s,
            refused=lambda _: None,
        )

    def cut(self) -> None:
        self.force_exit = True
        for connection in list(self.server_state.connections):
            transport = cast("asyncio.WriteTransport | None", connection.transport)
            if transport is not None:
                transport.abort()


def _config(api: ApiApp, options: ApiOptions) -> uvicorn.Config:
    connection: Any = partial(
        BoundedConnection, client_timeout_s=options.client_timeout_s, max_connections=options.max_connections
    )
    return uvicorn.Config(
        api.app,
        http=connection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
