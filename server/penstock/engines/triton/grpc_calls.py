"""Calls to an engine's gRPC port: unary calls over a reconnecting HTTP/2 connection, and streams over grpc.aio."""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TypeAlias, TypeVar

import grpc
from tritonclient.grpc import service_pb2

from penstock.engines.call_options import CallTimeouts, RetryBudget
from penstock.engines.failures import SHARED_MEMORY_FULL, means_shared_memory_full
from penstock.engines.triton.http2_connection import GRACE_S, CallBroken, CallNotProcessed, Http2Connection
from penstock.engines.triton.http2_protocol import GrpcReply, Keepalive, encode_head, metadata_fields
from penstock.protocol.call import GrpcAnswer, GrpcMetadata
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable

MAX_ATTEMPTS = 5
PAUSE_S = 0.005
_UNIX = "unix:/"
_PLAIN = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:/\[\]]+):[0-9]+")


def is_plain_address(address: str) -> bool:
    """Whether it is "host:port" or "unix:/path", not another kind of gRPC target."""
    return _PLAIN.fullmatch(address) is not None or is_socket_address(address)


def is_socket_address(address: str) -> bool:
    """Whether it is "unix:/path"."""
    return address.startswith(_UNIX)


class UnaryClient:
    """Create it inside the running loop. address: "host:port" or "unix:/path"."""

    def __init__(self, address: str, timeouts: CallTimeouts, *, budget: RetryBudget | None = None) -> None:
        """budget: for retries, shared with the engine's other clients."""
        self._address = address
        self._timeouts = timeouts
        self._budget = budget or RetryBudget()
        self._connection: Http2Connection | None = None
        self._connecting: asyncio.Task[Http2Connection] | None = None
        self._heads: dict[str, bytes] = {}
        self._is_closed = False

    async def call(self, method: str, message: bytes, metadata: GrpcMetadata) -> GrpcReply:
        """The engine's answer. A call that it did not process is retried. Raises CallBroken, TooManyAbandoned."""
        head = self._head(method)
        if metadata:
            head += metadata_fields(metadata)
        self._budget.calls += 1
        for turn in range(1, MAX_ATTEMPTS):
            try:
                return await (await self._open()).unary(head, message)
            except CallNotProcessed:
                if not self._budget.take(time.monotonic()):
                    raise
                await asyncio.sleep(turn * PAUSE_S)
        return await (await self._open()).unary(head, message)

    def close(self) -> None:
        """Closes the connection; calls in flight and later ones fail."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _open(self) -> Http2Connection:
        """The connection, made in a separate task because the caller may be cancelled meanwhile."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._is_closed:
            raise CallBroken("this client was closed")
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._take)
        connecting = self._connecting
        await asyncio.wait((connecting,))
        if connecting.cancelled():
            raise CallBroken("this client was closed")
        return connecting.result()

    def _take(self, connecting: asyncio.Task[Http2Connection]) -> None:
        self._connecting = None
        if connecting.cancelled() or connecting.exception() is not None:
            return
        self._connection = connecting.result()
        if self._is_closed:
            self._connection.close()

    async def _connect(self) -> Http2Connection:
        timeouts = self._timeouts
        try:
            async with asyncio.timeout(timeouts.connect_s):
                connection = await self._connected(Keepalive(timeouts.keepalive_s, timeouts.keepalive_timeout_s))
                try:
                    await connection.greeted()
                except BaseException:
                    connection.close()
                    raise
                return connection
        except TimeoutError as error:
            raise CallBroken(f"no answer within {timeouts.connect_s:g} s") from error
        except OSError as error:
            raise CallBroken(str(error)) from error

    async def _connected(self, keepalive: Keepalive) -> Http2Connection:
        """A new connection, before the engine's SETTINGS frame has arrived. Raises OSError."""
        loop = asyncio.get_running_loop()
        if is_socket_address(self._address):
            path = self._address.removeprefix("unix:")
            _, connection = await loop.create_unix_connection(lambda: Http2Connection(keepalive), path)
        else:
            host, _, port = self._address.rpartition(":")
            _, connection = await loop.create_connection(
                lambda: Http2Connection(keepalive), host.strip("[]"), int(port)
            )
        return connection

    def _head(self, method: str) -> bytes:
        head = self._heads.get(method)
        if head is None:
            authority = "localhost" if is_socket_address(self._address) else self._address
            head = encode_head(method.encode(), authority.encode())
            if len(self._heads) < 64:  # there are a dozen methods; a client may invent more
                self._heads[method] = head
        return head


StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
T = TypeVar("T")

STATUS_TIMEOUT_S = 0.5
# grpc.aio's own error for a write after the end of the call; the peer's status comes a moment later.
_LOCAL_WRITE_ERROR = "Internal error from Core"


class CallStatusWaiter:
    """Records each status of the call. Create it together with the call."""

    def __init__(self, call: StreamCall) -> None:
        self._call = call
        self._statuses: asyncio.Queue[tuple[grpc.StatusCode, str]] = asyncio.Queue()
        call.add_done_callback(self._record)  # called each time that the call's status is set

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """Waits for code and details. Raises EngineUnavailable if none comes within STATUS_TIMEOUT_S."""
        until = time.monotonic() + STATUS_TIMEOUT_S
        while True:
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    code, details = await self._statuses.get()
            except TimeoutError:
                raise EngineUnavailable("the engine's stream ended without a word; open it again") from None
            if details != _LOCAL_WRITE_ERROR:
                return code, details

    def _record(self, _: object) -> None:
        self._statuses.put_nowait((_completed_result(self._call.code()), _completed_result(self._call.details())))


def _completed_result(finished: "Coroutine[None, None, T]") -> T:
    try:
        finished.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("a call that is done has its status")


StatusConverter = Callable[[grpc.StatusCode, str, GrpcMetadata], GrpcAnswer]

MAX_LEAVING = 1024
_ERROR_FIELD = b"\x0a"  # error_message of a ModelStreamInferResponse; an answer begins with another field


class TritonGrpcStream:
    """A GrpcStream over grpc.aio. judge: converts the final status; it raises if the engine sent none.

    timeout_s: deadline, which is not sent to the engine. leaving: tasks that drain abandoned streams.
    Triton 2.51 crashes if a stream is cancelled while a model answers. So an abandoned stream is half-closed and read
    to its end. It is cancelled after GRACE_S, or at once beyond MAX_LEAVING.
    """

    def __init__(
        self,
        call: StreamCall,
        judge: StatusConverter,
        leaving: "set[asyncio.Task[None]]",
        timeout_s: float | None = None,
    ) -> None:
        self._call = call
        self._judge = judge
        self._leaving = leaving
        self._timeout_s = timeout_s
        self._until = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._is_late = False
        self._is_left = False
        # Separate tasks, because grpc.aio cancels the call if a reading or writing task is cancelled.
        self._reading: asyncio.Task[bytes | None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._status = CallStatusWaiter(call)

    async def send(self, message: bytes) -> None:
        """Returns when gRPC has space for more. No effect after the end of the call, which receive and end report."""
        self._writing = asyncio.create_task(_unless_ended(self._call.write(message)))
        await asyncio.shield(self._writing)

    async def half_close(self) -> None:
        self._writing = asyncio.create_task(_unless_ended(self._call.done_writing()))
        await asyncio.shield(self._writing)

    async def receive(self) -> bytes | None:
        try:
            async with asyncio.timeout_at(self._until):
                return await self._next()
        except TimeoutError:
            self._is_late = True
            self.cancel()
            return None

    async def end(self) -> GrpcAnswer:
        """Raises EngineUnavailable and DeadlineExceeded."""
        if self._is_late:
            raise DeadlineExceeded(f"the stream's deadline passed, {self._timeout_s:.3f} s after it was opened")
        trailing = tuple((key, value) for key, value in await self._call.trailing_metadata() or ())
        code, details = await self._status.status()
        return self._judge(code, details, trailing)

    def cancel(self) -> None:
        if self._is_left or self._call.done():
            return
        self._is_left = True
        if len(self._leaving) >= MAX_LEAVING:
            self._call.cancel()
            return
        leaving = asyncio.create_task(self._let_go())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _let_go(self) -> None:
        try:
            async with asyncio.timeout(GRACE_S):
                if self._writing is not None:
                    await asyncio.wait((self._writing,))
                await self.half_close()
                while await self._next() is not None:
                    pass
        except TimeoutError:
            pass
        finally:
            self._call.cancel()

    async def _next(self) -> bytes | None:
        """The next message. The read continues if the caller is cancelled."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        reading = self._reading
        message = await asyncio.shield(reading)
        if self._reading is reading:
            self._reading = None
        return message

    async def _read(self) -> bytes | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError:
            return None
        return _redacted(message) if isinstance(message, bytes) else None


async def _unless_ended(writing: "Coroutine[None, None, None]") -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await writing


def _redacted(message: bytes) -> bytes:
    """A ModelStreamInferResponse, without region keys in errors about shared memory."""
    if not message.startswith(_ERROR_FIELD):
        return message
    error = service_pb2.ModelStreamInferResponse.FromString(message)
    if means_shared_memory_full(error.error_message):
        error.error_message = SHARED_MEMORY_FULL
    return bytes(error.SerializeToString())
