"""Client of the engine's HTTP port: relays calls and answers as bytes over a bounded connection pool."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from penstock.engines.call_options import CallTimeouts, EngineHeaders, RetryBudget
from penstock.engines.failures import redact_region_keys
from penstock.engines.relayed_calls import READS, may_repeat
from penstock.engines.triton.http_connection import BodyStream, ConnectionBroken, HttpConnection, request_head
from penstock.network import client_context, host_and_port
from penstock.protocol.call import HttpAnswer, HttpCall, HttpStream
from penstock.protocol.cancellation import when_engine_done
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineOrigin:
    """Address of an HTTP server. base_path: prefix of every target. socket_path: of a Unix socket; empty for TCP."""

    host: str
    port: int
    is_tls: bool
    base_path: bytes
    socket_path: str = ""

    @property
    def authority(self) -> bytes:
        return host_and_port(self.host, self.port).encode()

    @property
    def place(self) -> str:
        """The address for messages to clients, without a socket's path."""
        return "its Unix socket" if self.socket_path else self.authority.decode()


def parse_engine_url(url: str) -> EngineOrigin:
    """The origin in an http://, https:// or unix:///path URL. Raises InvalidRequest."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and not parts.netloc and parts.path:
        return EngineOrigin("localhost", 80, is_tls=False, base_path=b"", socket_path=parts.path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"the engine's address is {url!r}; it must look like http://host:8000")
    is_tls = parts.scheme == "https"
    return EngineOrigin(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/").encode())


class TritonHttpClient:
    """Client with a pool of connections. Create it inside the running loop."""

    def __init__(
        self,
        origin: EngineOrigin,
        *,
        max_connections: int,
        timeouts: CallTimeouts,
        budget: RetryBudget | None = None,
        headers: EngineHeaders | None = None,
        finishes: bool = False,
    ) -> None:
        """finishes: the engine completes a POST after its connection is closed, as Triton 2.51 does."""
        self._headers = headers or EngineHeaders()
        self._origin = origin
        self._timeouts = timeouts
        self._budget = budget or RetryBudget()
        self._tls = client_context() if origin.is_tls else None
        self._idle: list[HttpConnection] = []
        self._slots = asyncio.Semaphore(max_connections)
        self._finishes = finishes
        self._is_closed = False

    async def relay(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        """The engine's unchanged answer. Raises EngineUnavailable, DeadlineExceeded, EngineFailed, InvalidRequest.

        Waits for a free connection. Cancellation closes it, unless the engine completes the call anyway: then it stays
        in use until its end, and the error has the abandoned call (see penstock.protocol.cancellation).
        """
        head = self._head(call)
        timeout_s = self._timeout_s(call, deadline)
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
                return await self._relayed(call, head)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine did not answer within {timeout_s:.3f} s") from error

    async def stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        """Returns after the answer's header. Raises as `relay`, also while reading. Closing early ends Triton's work.

        Occupies a connection until its chunks are read or closed. Without a deadline, each chunk has the timeout of an
        answer.
        """
        head = self._head(call)
        timeout_s = self._timeout_s(call, deadline)
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
                chunks = await self._begun(call, head, deadline)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine did not answer within {timeout_s:.3f} s") from error
        return chunks

    async def aclose(self) -> None:
        """Closes the idle connections; others close when their exchanges end."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _head(self, call: HttpCall) -> bytes:
        return request_head(self._headers.over_http(call), self._origin.authority, self._origin.base_path)

    def _timeout_s(self, call: HttpCall, deadline: float | None) -> float:
        if deadline is None:
            return self._timeouts.read_s if call.method in READS else self._timeouts.call_s
        timeout_s = deadline - time.monotonic()
        if timeout_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request could be sent to the engine")
        return timeout_s

    async def _send(self, call: HttpCall, exchange: Callable[[HttpConnection], Awaitable[T]]) -> T:
        """The exchange over an idle connection, else a new one. Retries once, if no response had begun."""
        self._budget.calls += 1
        connection = self._take_idle()
        if connection is not None:
            try:
                return await exchange(connection)
            except ConnectionBroken as broken:
                is_lost = broken.has_begun or not may_repeat(call)
                if is_lost or not self._budget.take(time.monotonic()):
                    raise EngineUnavailable(f"the connection to the engine broke: {broken}") from broken
        try:
            return await exchange(await self._connect())
        except ConnectionBroken as broken:
            raise EngineUnavailable(f"the connection to the engine broke: {broken}") from broken

    async def _relayed(self, call: HttpCall, head: bytes) -> HttpAnswer:
        """The answer. The slot is released when the engine has finished the call."""
        try:
            answer = await self._send(call, lambda connection: self._exchange(connection, call, head))
        except BaseException as error:
            when_engine_done(error, self._slots.release)
            raise
        self._slots.release()
        return answer

    async def _exchange(self, connection: HttpConnection, call: HttpCall, head: bytes) -> HttpAnswer:
        method = call.method
        is_finished = self._finishes and method == "POST"
        answer = await connection.exchange(head, call.body, is_head=method == "HEAD", is_finished=is_finished)
        self._keep(connection)
        return answer

    async def _begun(self, call: HttpCall, head: bytes, deadline: float | None) -> HttpStream:
        """The answer. Its chunks then own the slot."""
        used: list[HttpConnection] = []

        async def begin(connection: HttpConnection) -> tuple[HttpAnswer, BodyStream]:
            used[:] = [connection]
            return await connection.begin(head, call.body)

        try:
            answer, inflow = await self._send(call, begin)
        except BaseException:
            self._slots.release()
            raise
        chunks = self._chunks(used[0], inflow, deadline)
        await anext(chunks)  # the empty first chunk: now closing the generator runs its finally
        return HttpStream(answer.status, answer.headers, chunks)

    async def _chunks(
        self, connection: HttpConnection, inflow: BodyStream, deadline: float | None
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            while piece := await self._piece(inflow, deadline):
                yield piece
        finally:
            connection.finish()
            self._keep(connection)
            self._slots.release()

    async def _piece(self, inflow: BodyStream, deadline: float | None) -> bytes:
        timeout_s = self._timeouts.call_s if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return redact_region_keys(await inflow.take())
        except TimeoutError as error:
            raise DeadlineExceeded("the engine's answer did not end before the deadline") from error
        except ConnectionBroken as broken:
            raise EngineUnavailable(f"the connection to the engine broke: {broken}") from broken

    def _keep(self, connection: HttpConnection) -> None:
        if self._is_closed:
            connection.close()
        elif connection.is_open:
            self._idle.append(connection)

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        loop, origin = asyncio.get_running_loop(), self._origin
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                if origin.socket_path:
                    _, connection = await loop.create_unix_connection(HttpConnection, origin.socket_path)
                else:
                    _, connection = await loop.create_connection(
                        HttpConnection, origin.host, origin.port, ssl=self._tls
                    )
                return connection
        except TimeoutError as error:
            raise EngineUnavailable(
                f"no connection to the engine at {origin.place} within {self._timeouts.connect_s} s"
            ) from error
        except OSError as error:
            raise EngineUnavailable(f"cannot connect to the engine at {origin.place}: {error}") from error
