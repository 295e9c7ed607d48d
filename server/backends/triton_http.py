"""The engine's HTTP port: calls passed on and answers passed back, as bytes, over a bounded pool of connections."""

import asyncio
import ssl
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from server.backends.http_connection import ConnectionBroken, HttpConnection, request_head
from server.backends.patience import Patience
from server.core.address import authority
from server.core.errors import BackendUnavailable, DeadlineExceeded, InvalidRequest
from server.core.relay import HttpAnswer, HttpCall

_READS = ("GET", "HEAD")
_REPEATABLE_POSTS = (b"/infer", b"/index")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an HTTP server listens. base_path: empty, or what stands before every target."""

    host: str
    port: int
    is_tls: bool
    base_path: bytes

    @property
    def authority(self) -> bytes:
        return authority(self.host, self.port).encode()


def origin_of(url: str) -> Origin:
    """The origin in an http:// or https:// address. Raises InvalidRequest for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"the engine's address is {url!r}; it must look like http://host:8000")
    is_tls = parts.scheme == "https"
    return Origin(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/").encode())


class TritonHttp:
    """The Relay's HTTP half. Make it inside the running loop."""

    def __init__(self, origin: Origin, *, max_connections: int, patience: Patience) -> None:
        self._origin = origin
        self._patience = patience
        self._tls = ssl.create_default_context() if origin.is_tls else None
        self._idle: list[HttpConnection] = []
        self._slots = asyncio.Semaphore(max_connections)
        self._is_closed = False

    async def relay(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        """The engine's answer as it is. Raises BackendUnavailable, DeadlineExceeded, BackendFailed, InvalidRequest.

        Waits for one of the connections where all are in use. Cancelling drops the connection; Triton's HTTP port
        finishes the work all the same.
        """
        head = request_head(call, self._origin.authority, self._origin.base_path)
        timeout_s = self._patience_for(call) if deadline is None else deadline - time.monotonic()
        if timeout_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request could be sent to the engine")
        try:
            async with asyncio.timeout(timeout_s), self._slots:
                return await self._send(call, head)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine did not answer within {timeout_s:.3f} s") from error

    async def aclose(self) -> None:
        """Close the idle connections; those in use close as their exchanges end."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _patience_for(self, call: HttpCall) -> float:
        return self._patience.read_s if call.method in _READS else self._patience.call_s

    async def _send(self, call: HttpCall, head: bytes) -> HttpAnswer:
        """Over an idle connection, else a new one.

        A call is sent a second time in one case: the kept-alive connection turned out closed before any byte of an
        answer came, and the call is a read or an inference. An engine that closes an idle connection has not begun
        the work; one that died under it answers the second call with a refused connection.
        """
        connection = self._take_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, call, head)
            except ConnectionBroken as broken:
                if broken.has_begun or not _is_repeatable(call):
                    raise BackendUnavailable(f"the connection to the engine broke: {broken}") from broken
        try:
            return await self._exchange(await self._connect(), call, head)
        except ConnectionBroken as broken:
            raise BackendUnavailable(f"the connection to the engine broke: {broken}") from broken

    async def _exchange(self, connection: HttpConnection, call: HttpCall, head: bytes) -> HttpAnswer:
        answer = await connection.exchange(head, call.body, is_head=call.method == "HEAD")
        if self._is_closed:
            connection.close()
        elif connection.is_open:
            self._idle.append(connection)
        return answer

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        loop, origin = asyncio.get_running_loop(), self._origin
        try:
            async with asyncio.timeout(self._patience.connect_s):
                _, connection = await loop.create_connection(HttpConnection, origin.host, origin.port, ssl=self._tls)
                return connection
        except TimeoutError as error:
            where = origin.authority.decode()
            raise BackendUnavailable(f"no connection to {where} within {self._patience.connect_s} s") from error
        except OSError as error:
            raise BackendUnavailable(f"cannot connect to the engine at {origin.authority.decode()}: {error}") from error


def _is_repeatable(call: HttpCall) -> bool:
    path = call.target.partition(b"?")[0]
    return call.method in _READS or path.endswith(_REPEATABLE_POSTS)
