"""Client of the engine's gRPC port: relays calls as bytes, and converts gRPC status codes to our errors."""

import asyncio
import time
from collections.abc import Iterable
from typing import NamedTuple

import grpc

from penstock.engines.call_options import CallTimeouts, EngineHeaders, RetryBudget
from penstock.engines.failures import SHARED_MEMORY_FULL, means_out_of_memory, means_shared_memory_full
from penstock.engines.triton.grpc_calls import TritonGrpcStream, UnaryClient, is_plain_address, is_socket_address
from penstock.engines.triton.http2_connection import GRACE_S, CallBroken, TooManyAbandoned
from penstock.network import client_certificate, trusted_roots
from penstock.protocol.call import GrpcAnswer, GrpcCall, GrpcMetadata
from penstock.protocol.cancellation import mark_abandoned
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    NotSupported,
    OutOfMemory,
    Overloaded,
    reason_line,
)

SERVICE = "/inference.GRPCInferenceService/"
RECONNECT_FIRST_MS, RECONNECT_MAX_MS = 100, 1000
MAX_LARGE_GIVEN_UP = 64
MAX_HTTP2_MESSAGE_BYTES = 256 << 10  # larger messages cost less CPU over grpc.aio (see http2_connection)

_LONG_METHODS = (SERVICE + "ModelInfer", SERVICE + "RepositoryModelLoad")
_RESERVED_METADATA = frozenset(("user-agent", "te", "content-type", "host"))
# On a stream it makes Triton 2.51 end the call while a decoupled model still answers, and crash (SIGSEGV).
_FATAL_ON_STREAMS = frozenset(("triton_grpc_error",))
_CONNECTION_TEXTS = ("failed to connect", "Stream removed", "Socket closed", "Connection reset", "Cancelling all calls")
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Failure(NamedTuple):
    """A call that did not end with OK. is_connection: the connection broke; the status is not the engine's."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: GrpcMetadata
    is_connection: bool


class TritonGrpcClient:
    """Client with one HTTP/2 connection, which reconnects. Create it inside the running loop."""

    def __init__(
        self,
        address: str,
        *,
        is_tls: bool,
        timeouts: CallTimeouts,
        budget: RetryBudget | None = None,
        headers: EngineHeaders | None = None,
    ) -> None:
        self._headers = headers or EngineHeaders()
        self._address = address
        self._timeouts = timeouts
        options = _channel_options(timeouts)
        self._channel = (
            grpc.aio.secure_channel(address, _tls_credentials(), options)
            if is_tls
            else grpc.aio.insecure_channel(address, options)
        )
        is_plain = not is_tls and is_plain_address(address)
        self._budget = budget or RetryBudget()
        self._unary = UnaryClient(address, timeouts, budget=self._budget) if is_plain else None
        self._given_up: set[asyncio.Task[GrpcAnswer | Failure]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._methods: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    async def relay(self, call: GrpcCall, *, deadline: float | None) -> GrpcAnswer:
        """The engine's answer, also an error. Cancellation is passed on. Raises EngineUnavailable, DeadlineExceeded."""
        is_long = call.method in _LONG_METHODS
        max_wait_s = self._timeouts.call_s if is_long else self._timeouts.read_s
        outcome = await self._call(call, self._until(deadline, max_wait_s))
        if isinstance(outcome, GrpcAnswer):
            return outcome
        code: int = outcome.code.value[0]
        return GrpcAnswer(code, details=outcome.details, trailing_metadata=outcome.trailing_metadata)

    async def ask(
        self, method: str, message: bytes, *, deadline: float | None, max_wait_s: float, metadata: GrpcMetadata = ()
    ) -> bytes:
        """The response message. method: of GRPCInferenceService. max_wait_s: if no deadline. Raises InferenceError."""
        outcome = await self._call(GrpcCall(SERVICE + method, message, metadata), self._until(deadline, max_wait_s))
        if isinstance(outcome, GrpcAnswer):
            return outcome.message
        raise error_of(outcome.code, outcome.details)

    async def aclose(self) -> None:
        """Closes the connections; calls in flight fail."""
        if self._unary is not None:
            self._unary.close()
        await self._channel.close(None)

    @staticmethod
    def _until(deadline: float | None, max_wait_s: float) -> float:
        return time.monotonic() + max_wait_s if deadline is None else deadline

    async def _call(self, call: GrpcCall, until: float) -> GrpcAnswer | Failure:
        """Raises EngineUnavailable or DeadlineExceeded if there is no answer."""
        started = time.monotonic()
        if until <= started:
            raise DeadlineExceeded("the deadline passed before the request could be sent to the engine")
        if self._unary is not None and len(call.message) <= MAX_HTTP2_MESSAGE_BYTES:
            return await self._call_plainly(self._unary, call, until - started)
        if len(self._given_up) >= MAX_LARGE_GIVEN_UP:
            raise _overloaded(f"{len(self._given_up)} large abandoned calls are still in the engine")
        self._budget.calls += 1
        running = self._method(call.method)(call.message, metadata=self._sent(call.metadata) or None)
        outcome = await self._within(running, until - started)
        if isinstance(outcome, Failure) and outcome.is_connection:
            raise self._unreachable("no connection to the engine", outcome.details)
        return outcome

    async def _within(self, running: "grpc.aio.UnaryUnaryCall[bytes, bytes]", timeout_s: float) -> GrpcAnswer | Failure:
        waiting = asyncio.create_task(self._outcome(running))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(waiting)
        except TimeoutError as error:
            late = DeadlineExceeded(f"the engine did not answer within {timeout_s:.3f} s")
            self._give_up(waiting, running, late)
            raise late from error
        except asyncio.CancelledError as error:
            self._give_up(waiting, running, error)
            raise

    def _give_up(
        self,
        waiting: "asyncio.Task[GrpcAnswer | Failure]",
        running: "grpc.aio.UnaryUnaryCall[bytes, bytes]",
        error: BaseException,
    ) -> None:
        if waiting.done():
            return
        call = mark_abandoned(error)
        self._given_up.add(waiting)
        waiting.add_done_callback(self._given_up.discard)
        waiting.add_done_callback(lambda done: call.end(is_served=_is_good(done)))
        asyncio.get_running_loop().call_later(GRACE_S, running.cancel)

    async def _outcome(self, running: "grpc.aio.UnaryUnaryCall[bytes, bytes]") -> GrpcAnswer | Failure:
        try:
            message = await running
            return GrpcAnswer(0, message, trailing_metadata=_metadata(await running.trailing_metadata()))
        except grpc.aio.AioRpcError as error:
            return self._failure(error)

    async def _call_plainly(self, unary: UnaryClient, call: GrpcCall, timeout_s: float) -> GrpcAnswer | Failure:
        metadata = self._sent(call.metadata)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await unary.call(call.method, call.message, metadata)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine did not answer within {timeout_s:.3f} s") from error
        except TooManyAbandoned as error:
            raise _overloaded(str(error)) from error
        except CallBroken as error:
            raise self._unreachable("no connection to the engine", str(error)) from error
        if reply.code == 0:
            return GrpcAnswer(0, reply.message, trailing_metadata=reply.trailing_metadata)
        code = _CODES.get(reply.code, grpc.StatusCode.UNKNOWN)
        return Failure(code, reply.details, reply.trailing_metadata, is_connection=False)

    def _method(self, path: str) -> "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]":
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self._channel.unary_unary(path, None, None)
        return method

    def _sent(self, metadata: GrpcMetadata) -> GrpcMetadata:
        return self._headers.over_grpc(_forwarded(metadata) if metadata else ())

    def open_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> TritonGrpcStream:
        """A bidirectional call, without the metadata `triton_grpc_error`. Raises DeadlineExceeded."""
        timeout_s = None if deadline is None else deadline - time.monotonic()
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineExceeded("the deadline passed before the stream could be opened to the engine")
        forwarded = tuple((key, value) for key, value in self._sent(metadata) if key not in _FATAL_ON_STREAMS)
        call = self._channel.stream_stream(method, None, None)(None, None, forwarded)

        def judge(code: grpc.StatusCode, details: str, trailing: GrpcMetadata) -> GrpcAnswer:
            if code is grpc.StatusCode.OK:
                return GrpcAnswer(0, trailing_metadata=trailing)
            if self._is_broken(code, details):
                raise self._unreachable("the engine's stream broke", details)
            return GrpcAnswer(code.value[0], details=details, trailing_metadata=trailing)

        return TritonGrpcStream(call, judge, self._leaving, timeout_s)

    def _unreachable(self, what: str, details: str) -> EngineUnavailable:
        """Clients see the message, so it contains no path of this host."""
        where, reason = self._address, details
        if is_socket_address(where):
            where, reason = "its Unix socket", details.replace(where, "the socket")
        return EngineUnavailable(f"{what} at {where}: {reason_line(reason)}")

    def _failure(self, error: grpc.aio.AioRpcError) -> Failure:
        details = error.details() or ""
        trailing: Iterable[tuple[str, str | bytes]] | None = error.trailing_metadata()  # type: ignore[assignment]
        return Failure(error.code(), details, _metadata(trailing), self._is_broken(error.code(), details))

    def _is_broken(self, code: grpc.StatusCode, details: str) -> bool:
        """Whether UNAVAILABLE is from gRPC itself: the connection is not READY, or the text is one of gRPC's."""
        return code is grpc.StatusCode.UNAVAILABLE and (
            self._channel.get_state() is not grpc.ChannelConnectivity.READY
            or any(text in details for text in _CONNECTION_TEXTS)
        )


def _is_good(done: "asyncio.Task[GrpcAnswer | Failure]") -> bool:
    return not done.cancelled() and done.exception() is None and isinstance(done.result(), GrpcAnswer)


def _overloaded(why: str) -> Overloaded:
    return Overloaded(f"{why}; retry after {GRACE_S} s", retry_after_s=GRACE_S)


def error_of(code: grpc.StatusCode, details: str) -> InferenceError:
    """Our error for an engine's gRPC status, without the engine's traceback."""
    reason = reason_line(details) or f"the engine answered {code.name} without a reason"
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(reason)
    if means_shared_memory_full(reason):
        return OutOfMemory(SHARED_MEMORY_FULL)
    kinds: dict[grpc.StatusCode, type[InferenceError]] = {
        grpc.StatusCode.NOT_FOUND: ModelNotFound,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        grpc.StatusCode.UNIMPLEMENTED: NotSupported,
        grpc.StatusCode.CANCELLED: EngineUnavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: EngineUnavailable,
    }
    kind = kinds.get(code, EngineFailed)
    return OutOfMemory(reason) if kind is EngineFailed and means_out_of_memory(reason) else kind(reason)


def _unavailable(reason: str) -> InferenceError:
    """Triton also answers UNAVAILABLE for a full queue, a late request and a loading model."""
    if "Exceeds maximum queue size" in reason:
        return Overloaded(f"the engine's queue is full: {reason}")
    if "Request timeout expired" in reason:
        return DeadlineExceeded(f"the engine dropped the request: {reason}")
    if "not at ready state" in reason:
        return ModelNotReady(reason)
    return EngineUnavailable(reason)


def _forwarded(metadata: GrpcMetadata) -> GrpcMetadata:
    return tuple(
        (key, value) for key, value in metadata if key not in _RESERVED_METADATA and not key.startswith((":", "grpc-"))
    )


def _metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> GrpcMetadata:
    return tuple((key, value) for key, value in metadata) if metadata else ()


def _tls_credentials() -> grpc.ChannelCredentials:
    """Like client_context, for gRPC. Raises InvalidRequest."""
    certificate = client_certificate()
    return grpc.ssl_channel_credentials(trusted_roots(), certificate, certificate)


def _channel_options(timeouts: CallTimeouts) -> list[tuple[str, int]]:
    """No limit on messages, fast reconnection, and pings while calls are in flight.

    grpc.http2.ping_timeout_ms also limits gRPC's bandwidth probes, by default to a minute. Pings without calls would
    count as an attack ("too_many_pings").
    """
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
        ("grpc.min_reconnect_backoff_ms", int(timeouts.connect_s * 1000)),
        ("grpc.keepalive_time_ms", int(timeouts.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(timeouts.keepalive_timeout_s * 1000)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
