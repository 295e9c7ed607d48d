"""Serves an ASGI application on bound sockets with uvicorn, without its signal handling."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.engines.call_options import CuttableCalls
from penstock.gateway.rest.connection import LimitedHttpProtocol, ListenerState, UnreadAnswers
from penstock.gateway.rest.limits import ConnectionLimits
from penstock.gateway.rest.responses import response_of
from penstock.gateway.rest.served_request import SERVED_REQUEST, ServedRequest
from penstock.network import Sockets
from penstock.protocol.errors import EngineUnavailable
from penstock.tls import CurrentTls, TlsAcceptor

CUT_GRACE_S = 1.0  # for the last answers to leave
SWEEP_INTERVAL_S = 1.0
SWEPT_AT_ONCE = 500  # connections; requests get a turn in between


class UncountedBytes:
    """For a listener without connection counts."""

    def hold(self, size_bytes: int) -> None:
        """Not counted."""

    def release(self, size_bytes: int) -> None:
        """Not counted."""


class HttpListener:
    """Serves from `start` on; `stop` closes idle connections, lets running requests end, then returns.

    listener: bound sockets of one port, or the path of a Unix socket to create.
    unread: counts answers that clients have not read.
    refused: called with a stable reason for each connection that is refused or closed. tls: None for plain HTTP.
    is_elsewhere: see ListenerState; not used with TLS.
    """

    def __init__(  # noqa: PLR0913 - one argument for each part
        self,
        app: ASGIApp,
        listener: socket.socket | Sockets | Path,
        *,
        limits: ConnectionLimits | None = None,
        unread: UnreadAnswers | None = None,
        refused: Callable[[str], None] = lambda _: None,
        tls: CurrentTls | None = None,
        is_elsewhere: Callable[[int, int], bool] | None = None,
    ) -> None:
        self._cuttable = _DrainableApp(app)
        self._limits = limits or ConnectionLimits()
        guard = self._guard = ListenerState(self._limits, unread or UncountedBytes(), refused)
        if is_elsewhere is not None:
            guard = replace(guard, is_elsewhere=is_elsewhere)
        config = uvicorn.Config(
            self._cuttable,
            uds=str(listener) if isinstance(listener, Path) else None,
            http=cast(type[asyncio.Protocol], partial(LimitedHttpProtocol, guard)),
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        self._server = _UvicornServer(config, tls, self._limits, refused)
        self._listeners = (
            () if isinstance(listener, Path) else (listener,) if isinstance(listener, socket.socket) else listener
        )
        self._task: asyncio.Task[None] | None = None
        self._taking: set[asyncio.Task[object]] = set()

    @property
    def port(self) -> int:
        """The TCP port; 0 where it is none."""
        return int(self._listeners[0].getsockname()[1]) if self._listeners else 0

    @property
    def connection_count(self) -> int:
        """Open connections."""
        return len(self._server.server_state.connections)

    def take(self, connection: socket.socket) -> None:
        """Serves a client's connection that another process accepted. Raises OSError."""
        connection.setblocking(False)
        config, state = self._server.config, self._server.server_state
        protocol = partial(LimitedHttpProtocol, self._guard, config=config, server_state=state, app_state={})
        loop = asyncio.get_running_loop()
        taking = loop.create_task(loop.connect_accepted_socket(protocol, connection))
        self._taking.add(taking)
        taking.add_done_callback(self._taken)

    def _taken(self, taking: "asyncio.Task[object]") -> None:
        self._taking.discard(taking)
        if not taking.cancelled():
            taking.exception()  # the client left

    def start(self) -> None:
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        sweeping = asyncio.create_task(self._sweep())
        try:
            await self._server.serve(sockets=list(self._listeners) or None)
        finally:
            sweeping.cancel()

    async def _sweep(self) -> None:
        """End what is too slow, at most an interval after its time."""
        limits, now = self._limits, asyncio.get_running_loop().time
        shortest_s = min(limits.head_timeout_s, limits.idle_timeout_s, limits.write_timeout_s)
        while True:
            await asyncio.sleep(min(SWEEP_INTERVAL_S, shortest_s / 4))
            for number, connection in enumerate(list(self._server.server_state.connections), start=1):
                cast(LimitedHttpProtocol, connection).sweep(now())
                if number % SWEPT_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def stop(self, grace_s: float) -> bool:
        """Whether every running request ended within the grace; those that did not are cut, with a 503."""
        self._server.should_exit = True
        if self._task is None:
            return True
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._task)
        except TimeoutError:
            await self._cut(self._task)
            return False
        return True

    async def _cut(self, serving: asyncio.Task[None]) -> None:
        self._cuttable.cut()
        await asyncio.wait({serving}, timeout=CUT_GRACE_S)
        self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await serving


class _DrainableApp:
    """The app, its running requests known, so that the end of a drain can answer them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running = CuttableCalls()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served: ServedRequest | None = scope.get(SERVED_REQUEST)
        try:
            with self._running:
                await self._app(scope, receive, send if served is None else served.send)
        except EngineUnavailable as error:
            if served is not None and not served.has_begun:
                response = response_of(error)
                response.headers["Connection"] = "close"
                await response(scope, receive, served.send)

    def cut(self) -> None:
        """End every running request now."""
        self._running.cut("this gateway stopped before the answer came; send to another one")


class _UvicornServer(uvicorn.Server):
    """A uvicorn server without signal handlers; its TLS context is reloaded elsewhere."""

    def __init__(
        self, config: uvicorn.Config, tls: CurrentTls | None, limits: ConnectionLimits, refused: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._tls_limits = limits
        self._refused = refused

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, over TLS if there is a context."""
        if self._tls is None or sockets is None:
            await super().startup(sockets)
            return
        made = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        protocol = partial(made, config=self.config, server_state=self.server_state, app_state={})
        limits = self._tls_limits
        acceptors = [
            TlsAcceptor(
                each,
                self._tls,
                protocol,
                limits=limits,
                handshake_timeout_s=limits.head_timeout_s,
                refused=self._refused,
            )
            for each in sockets
        ]
        self.servers = cast(list[asyncio.base_events.Server], acceptors)
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
