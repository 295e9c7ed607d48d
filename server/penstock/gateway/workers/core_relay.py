"""A worker's relay to the core: HTTP and gRPC calls as bytes over Unix sockets, with the client's identity."""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from grpc import ChannelConnectivity, StatusCode, aio

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton.grpc_calls import CallStatusWaiter
from penstock.engines.triton.http_client import TritonHttpClient, parse_engine_url
from penstock.protocol.call import A, Call, GrpcAnswer, GrpcCall, GrpcMetadata, HttpCall, HttpStream
from penstock.protocol.engine import GrpcStream
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable
from penstock.protocol.identity import IDENTITY_HEADER, Identity, encode_identity

HTTP_SOCKET, GRPC_SOCKET = "core-http.sock", "core-grpc.sock"
CORE_GONE = "the gateway's core is restarting; retry in a second"
_RESERVED_METADATA = frozenset(("user-agent", "te", "content-type", "host", IDENTITY_HEADER))
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2000),  # also the time that a connection to a busy core may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def _pings(timeouts: CallTimeouts) -> tuple[tuple[str, int], ...]:
    """Pings end the calls of a stopped core, even those without a deadline."""
    return (
        ("grpc.keepalive_time_ms", int(timeouts.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )


def with_caller(call: HttpCall, caller: Identity) -> HttpCall:
    """The call with the client's identity. Headers of that name from the client are removed."""
    return call.with_headers(((IDENTITY_HEADER, encode_identity(caller)),), dropped=(IDENTITY_HEADER,))


def with_caller_metadata(metadata: GrpcMetadata, caller: Identity) -> GrpcMetadata:
    """The metadata with the client's identity, without entries of the client's own connection."""
    kept = tuple(
        (key, value) for key, value in metadata if key not in _RESERVED_METADATA and not key.startswith((":", "grpc-"))
    )
    return (*kept, (IDENTITY_HEADER, encode_identity(caller)))


class CoreRelay:
    """Relays calls to the core. Create it in the running loop. Raises EngineUnavailable, DeadlineExceeded."""

    def __init__(self, run_dir: Path, *, max_connections: int, timeouts: CallTimeouts | None = None) -> None:
        timeouts = timeouts or CallTimeouts()
        origin = parse_engine_url(f"unix://{run_dir / HTTP_SOCKET}")
        self._http = TritonHttpClient(origin, max_connections=max_connections, timeouts=timeouts)
        self._channel = aio.insecure_channel(f"unix:{run_dir / GRPC_SOCKET}", (*_OPTIONS, *_pings(timeouts)))
        self._methods: dict[str, aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    async def aclose(self) -> None:
        """Closes the connections; calls in flight fail."""
        await self._http.aclose()
        await self._channel.close(None)

    async def send(self, call: Call[A], caller: Identity, *, deadline: float | None) -> A:
        """The core's whole answer. Cancelling also cancels the call at the core."""
        if isinstance(call, GrpcCall):
            return cast(A, await self._send_grpc(call, caller, deadline))
        try:
            return cast(A, await self._http.relay(with_caller(cast(HttpCall, call), caller), deadline=deadline))
        except EngineUnavailable as error:
            raise EngineUnavailable(CORE_GONE) from error

    async def stream(self, call: HttpCall, caller: Identity, *, deadline: float | None) -> HttpStream:
        """The core's answer once its head has arrived. Its chunks raise like TritonHttpClient's."""
        try:
            return await self._http.stream(with_caller(call, caller), deadline=deadline)
        except EngineUnavailable as error:
            raise EngineUnavailable(CORE_GONE) from error

    def open_stream(self, method: str, metadata: GrpcMetadata, caller: Identity) -> GrpcStream:
        call = self._channel.stream_stream(method, None, None)(None, None, with_caller_metadata(metadata, caller))
        return CoreStream(call, self._judged)

    async def _send_grpc(self, call: GrpcCall, caller: Identity, deadline: float | None) -> GrpcAnswer:
        timeout_s = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._unary(call.method, call.message, with_caller_metadata(call.metadata, caller))
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer came within {timeout_s or 0:.3f} s; allow more time") from error

    async def _unary(self, method: str, message: bytes, metadata: GrpcMetadata) -> GrpcAnswer:
        running = self._method(method)(message, metadata=metadata)
        try:
            answer = await running
            return GrpcAnswer(0, answer, trailing_metadata=_metadata(await running.trailing_metadata()))
        except aio.AioRpcError as error:
            trailing: Iterable[tuple[str, str | bytes]] | None = error.trailing_metadata()  # type: ignore[assignment]
            return self._judged(error.code(), error.details() or "", _metadata(trailing))

    def _method(self, path: str) -> "aio.UnaryUnaryMultiCallable[bytes, bytes]":
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self._channel.unary_unary(path, None, None)
        return method

    def _judged(self, code: StatusCode, details: str, trailing: GrpcMetadata) -> GrpcAnswer:
        """The core's status while connected; otherwise raises gRPC's error."""
        if code is StatusCode.UNAVAILABLE and self._channel.get_state() is not ChannelConnectivity.READY:
            raise EngineUnavailable(CORE_GONE)
        return GrpcAnswer(code.value[0], details=details, trailing_metadata=trailing)


class CoreStream:
    """A GrpcStream over grpc.aio. judge: maps the call's end; it raises if the core is gone."""

    def __init__(
        self, call: "aio.StreamStreamCall[bytes, bytes]", judge: Callable[[StatusCode, str, GrpcMetadata], GrpcAnswer]
    ) -> None:
        self._call = call
        self._judge = judge
        self._last_word = CallStatusWaiter(call)

    async def send(self, message: bytes) -> None:
        """Does nothing on a call that has ended."""
        try:
            await self._call.write(message)
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def half_close(self) -> None:
        try:
            await self._call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def receive(self) -> bytes | None:
        """The next message; None after the last one."""
        try:
            message = await self._call.read()
        except aio.AioRpcError:
            return None
        return message if isinstance(message, bytes) else None

    async def end(self) -> GrpcAnswer:
        """The call's status from the core. Raises EngineUnavailable if it is gone."""
        trailing = _metadata(await self._call.trailing_metadata())
        code, details = await self._last_word.status()
        return self._judge(code, details or "", trailing)

    def cancel(self) -> None:
        self._call.cancel()


def _metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> GrpcMetadata:
    return tuple((key, value) for key, value in metadata) if metadata else ()
