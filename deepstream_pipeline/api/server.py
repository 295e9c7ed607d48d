"""The control API as main starts and stops it: uvicorn in a thread of its own."""

import asyncio
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import structlog
import uvicorn

from deepstream_pipeline.api.app import ApiApp, create_app
from deepstream_pipeline.api.connection import BoundedConnection
from deepstream_pipeline.api.listening import listeners_of
from deepstream_pipeline.api.options import ApiOptions, ApiRefused
from deepstream_pipeline.interfaces import PipelineControl, Previews
from deepstream_pipeline.metrics import CONTENT_TYPE
from server.access.tls_acceptor import CurrentTls, TlsAcceptor
from server.core.connections import PortLimits

log = structlog.get_logger(component="video")

_KEEP_ALIVE_S = 15
_START_TIMEOUT_S = 30.0


class Page(Protocol):
    """What the metrics are read from."""

    def page(self) -> bytes: ...


class ApiServer:
    """Serves from `start` until `stop`. The pipeline's calls run on threads of the API's own."""

    def __init__(self, control: PipelineControl, previews: Previews, metrics: Page, options: ApiOptions) -> None:
        self._options = options
        self._api: ApiApp = create_app(control, previews, metrics.page, options, CONTENT_TYPE)
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
        """Serve, from when this returns. Raises ApiRefused where the address cannot be listened on."""
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
        """Take no more, let running requests end within the time, cut the others. Ends moving previews at once."""
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
                runner.run(self._server.serve(sockets=self._listeners))
        except Exception:  # the thread's root
            log.exception("api_failed", reason="internal")
        finally:
            for listener in self._listeners:
                listener.close()


class _Server(uvicorn.Server):
    """uvicorn, that says when it serves, and can cut who does not end."""

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
