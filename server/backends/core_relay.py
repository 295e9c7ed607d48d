"""A front's way to the core's REST and gRPC: calls as bytes over Unix sockets, with the caller told."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from grpc import ChannelConnectivity, StatusCode, aio

from server.backends.last_word import LastWord
from server.backends.patience import Patience
from server.backends.triton_http import TritonHttp, origin_of
from server.core.backend import GrpcStream
from server.core.caller import Caller
from server.core.conveyance import CALLER_HEADER, caller_told
from server.core.errors import BackendUnavailable, DeadlineExceeded
from server.core.relay import GrpcAnswer, GrpcCall, GrpcMetadata, HttpAnswer, HttpCall, HttpStream

HTTP_SOCKET, GRPC_SOCKET = "core-http.sock", "core-grpc.sock"
CORE_GONE = "the gateway's core is restarting; retry in a second"
_HEADER = CALLER_HEADER.encode()
_RESERVED_METADATA = frozenset(("user-agent", "te", "content-type", "host", CALLER_HEADER))
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def _pings(patience: Patience) -> tuple[tuple[str, int], ...]:
    """A core that was stopped answers none: its calls end, those without a deadline, too. It minds no pings."""
    return (
        ("grpc.keepalive_time_ms", int(patience.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(patience.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(patience.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )


def told_over_http(call: HttpCall, caller: Caller) -> HttpCall:
    """The call with its caller, and without whatever the client itself said there."""
    headers = tuple(pair for pair in call.headers if pair[0].lower() != _HEADER)
    return replace(call, headers=(*headers, (_HEADER, caller_told(caller).encode())))


def told_over_grpc(metadata: GrpcMetadata, caller: Caller) -> GrpcMetadata:
    """The metadata with the caller, and without what belongs to the client's own connection."""
    kept = tuple(
        (key, value) for key, value in metadata if key not in _RESERVED_METADATA and not key.startswith((":", "grpc-"))
    )
    return (*kept, (CALLER_HEADER, caller_told(caller)))


class CoreRelay:
    """Whatever the core answers, errors too, is an answer. Make it inside the running loop.

    Raises BackendUnavailable at once while there is no core, soon where it has fallen silent, and DeadlineExceeded.
    """

    def __init__(self, run_dir: Path, *, max_connections: int, patience: Patience | None = None) -> None:
        patience = patience or Patience()
        origin = origin_of(f"unix://{run_dir / HTTP_SOCKET}")
        self._http = TritonHttp(origin, max_connections=max_connections, patience=patience)
        self._channel = aio.insecure_channel(f"unix:{run_dir / GRPC_SOCKET}", (*_OPTIONS, *_pings(patience)))
        self._methods: dict[str, aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    async def aclose(self) -> None:
        """Close the connections; calls in flight fail."""
        await self._http.aclose()
        await self._channel.close(None)

    async def http(self, call: HttpCall, caller: Caller, *, deadline: float | None) -> HttpAnswer:
        """The core's answer, whole."""
        try:
            return await self._http.relay(told_over_http(call, caller), deadline=deadline)
        except BackendUnavailable as error:
            raise BackendUnavailable(CORE_GONE) from error

    async def http_stream(self, call: HttpCall, caller: Caller, *, deadline: float | None) -> HttpStream:
        """The core's answer as soon as its head is there; its chunks raise as TritonHttp's do."""
        try:
            return await self._http.stream(told_over_http(call, caller), deadline=deadline)
        except BackendUnavailable as error:
            raise BackendUnavailable(CORE_GONE) from error

    async def grpc(self, call: GrpcCall, caller: Caller, *, deadline: float | None) -> GrpcAnswer:
        """The core's answer. Cancelling cancels it there."""
        timeout_s = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._unary(call.method, call.message, told_over_grpc(call.metadata, caller))
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer came within {timeout_s or 0:.3f} s; allow more time") from error

    def grpc_stream(self, method: str, metadata: GrpcMetadata, caller: Caller) -> GrpcStream:
        """A bidirectional call, open."""
        call = self._channel.stream_stream(method, None, None)(None, None, told_over_grpc(metadata, caller))
        return CoreStream(call, self._judged)

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
        """The core says how a call ends while the connection to it stands; else gRPC itself says so."""
        if code is StatusCode.UNAVAILABLE and self._channel.get_state() is not ChannelConnectivity.READY:
            raise BackendUnavailable(CORE_GONE)
        return GrpcAnswer(code.value[0], details=details, trailing_metadata=trailing)


class CoreStream:
    """A GrpcStream over grpc.aio. judge: what the end of the call means; it raises where the core said nothing."""

    def __init__(
        self,
        call: "aio.StreamStreamCall[bytes, bytes]",
        judge: Callable[[StatusCode, str, GrpcMetadata], GrpcAnswer],
    ) -> None:
        self._call = call
        self._judge = judge
        self._last_word = LastWord(call)

    async def send(self, message: bytes) -> None:
        """On a call that has ended it does nothing: receive and end tell of it."""
        try:
            await self._call.write(message)
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def half_close(self) -> None:
        """Nothing more will be sent."""
        try:
            await self._call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def receive(self) -> bytes | None:
        """The next message; None when there will be no more."""
        try:
            message = await self._call.read()
        except aio.AioRpcError:
            return None
        return message if isinstance(message, bytes) else None

    async def end(self) -> GrpcAnswer:
        """How the core ended the call. Raises BackendUnavailable where it is gone."""
        trailing = _metadata(await self._call.trailing_metadata())
        code, details = await self._last_word.told()
        return self._judge(code, details or "", trailing)

    def cancel(self) -> None:
        """End it at once."""
        self._call.cancel()


def _metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> GrpcMetadata:
    return tuple((key, value) for key, value in metadata) if metadata else ()
