"""The way to the engine, with a span around each call that belongs to a traced request."""

from collections.abc import AsyncGenerator
from dataclasses import replace

from server.core.backend import GrpcStream, Relay
from server.core.relay import GrpcAnswer, GrpcCall, GrpcMetadata, HttpAnswer, HttpCall, HttpHeaders, HttpStream
from server.tracing.trace import PARENT_HEADERS, EngineSpan, TraceHeaders, current_trace

_PARENT_BYTES = tuple(name.encode() for name in PARENT_HEADERS)
_HTTP_ERROR = 500
# gRPC's codes for what went wrong on the engine's side: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL,
# UNAVAILABLE, DATA_LOSS.
GRPC_ERRORS = frozenset((2, 4, 12, 13, 14, 15))


class TracedRelay:
    """A Relay over another one. The engine's traceparent is that of the call's span; other calls pass untouched."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def http(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        trace = current_trace.get()
        if trace is None:
            return await self._relay.http(call, deadline=deadline)
        span = trace.engine("engine")
        try:
            answer = await self._relay.http(_with_http_parent(call, span.headers), deadline=deadline)
        except BaseException:
            span.end(is_error=True)
            raise
        span.end(code=answer.status, is_error=answer.status >= _HTTP_ERROR)
        return answer

    async def http_stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        """The span ends with the last piece."""
        trace = current_trace.get()
        if trace is None:
            return await self._relay.http_stream(call, deadline=deadline)
        span = trace.engine("engine")
        try:
            stream = await self._relay.http_stream(_with_http_parent(call, span.headers), deadline=deadline)
        except BaseException:
            span.end(is_error=True)
            raise
        chunks = _until_end(stream, span)
        await anext(chunks)  # an empty one: from here on closing the generator reaches its finally
        return replace(stream, chunks=chunks)

    async def grpc(self, call: GrpcCall, *, deadline: float | None) -> GrpcAnswer:
        trace = current_trace.get()
        if trace is None:
            return await self._relay.grpc(call, deadline=deadline)
        span = trace.engine("engine")
        told = replace(call, metadata=_with_grpc_parent(call.metadata, span.headers))
        try:
            answer = await self._relay.grpc(told, deadline=deadline)
        except BaseException:
            span.end(is_error=True)
            raise
        span.end(code=answer.code, is_error=answer.code in GRPC_ERRORS)
        return answer

    async def grpc_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> GrpcStream:
        """Untouched: a stream is many requests, and its own traceparent stands for all of them."""
        return await self._relay.grpc_stream(method, metadata, deadline=deadline)


async def _until_end(stream: HttpStream, span: EngineSpan) -> AsyncGenerator[bytes, None]:
    is_error = True
    try:
        yield b""
        async for chunk in stream.chunks:
            yield chunk
        is_error = stream.status >= _HTTP_ERROR
    finally:
        span.end(code=stream.status, is_error=is_error)
        await stream.chunks.aclose()


def _with_http_parent(call: HttpCall, parent: TraceHeaders) -> HttpCall:
    headers: HttpHeaders = tuple(header for header in call.headers if header[0] not in _PARENT_BYTES)
    return replace(call, headers=headers + tuple((name.encode(), value.encode()) for name, value in parent))


def _with_grpc_parent(metadata: GrpcMetadata, parent: TraceHeaders) -> GrpcMetadata:
    return tuple(pair for pair in metadata if pair[0] not in PARENT_HEADERS) + parent
