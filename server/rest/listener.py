"""A bound socket with an ASGI app behind it, served by uvicorn without its signal handling."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 2048


class PortTaken(Exception):
    """An address cannot be listened on. The message names it, and the flag that chooses another."""


def bind(host: str, port: int, *, flag: str) -> socket.socket:
    """A listening TCP socket; port 0 lets the system pick. Raises PortTaken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortTaken(
            f"cannot listen on {host}:{port} ({error.strerror}); stop what holds it, or choose another port with {flag}"
        ) from error
    listener.listen(BACKLOG)
    return listener


class HttpListener:
    """Serves from `start` on; `stop` closes idle connections, lets running requests end, then returns."""

    def __init__(self, app: ASGIApp, listener: socket.socket, *, keep_alive_s: int = 75) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
        )
        self._server = _Server(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self, grace_s: float) -> bool:
        """Whether every running request ended within the grace; those that did not are cut."""
        self._server.should_exit = True
        if self._task is None:
            return True
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._task)
        except TimeoutError:
            self._server.force_exit = True
            await self._task
            return False
        return True


class _Server(uvicorn.Server):
    """Signals belong to the composer."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
