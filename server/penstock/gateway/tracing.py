"""Traces of requests, and a Relay with a span for each engine call. Without a collector current_trace is None."""

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from penstock.protocol.call import MIN_HTTP_FAULT, A, Call, GrpcMetadata, HttpCall, HttpStream
from penstock.protocol.engine import GrpcStream, Relay
from penstock.protocol.inference import Timings

TraceHeaders = tuple[tuple[str, str], ...]
"""W3C's traceparent and tracestate."""

PARENT_HEADERS = ("traceparent", "tracestate")


class EngineSpan(Protocol):
    """One call to the engine. headers: sent to the engine, so that its spans become children of this one."""

    @property
    def headers(self) -> TraceHeaders: ...

    def end(self, *, code: int | None = None, is_error: bool = False) -> None:
        """Ends the span. code: the HTTP or gRPC status, None if the engine did not answer."""
        ...


class Trace(Protocol):
    """One request, from its head to its response. Use it in the event loop's thread."""

    def arrived(self, model: str) -> None:
        """The request for this model was admitted. It waits until its first stage or engine call."""
        ...

    def stages(self, stages: Iterable[tuple[str, float]]) -> None:
        """Adds finished consecutive stages as (name, seconds), of which the last ends now."""
        ...

    def engine(self, name: str) -> EngineSpan:
        """Begins an engine call; the wait before it becomes the span `queue`."""
        ...

    def end(self, name: str, *, code: int, is_error: bool) -> None:
        """The request was answered. name: of the operation, bounded. code: the HTTP or gRPC status."""
        ...


class Tracer(Protocol):
    """Begins traces and sends ended ones to the collector."""

    def begin(self, headers: Iterable[tuple[str, str]], protocol: str) -> Trace:
        """Begins the trace of a request. It is sent when it ends. headers: may have traceparent and tracestate."""
        ...


K = TypeVar("K", bound=Call[Any])
current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)
"""The trace of the request that this task works for."""


def trace_arrival(model: str) -> None:
    """Records that the current request was admitted. model: its bounded label."""
    trace = current_trace.get()
    if trace is not None:
        trace.arrived(model)


@contextmanager
def engine_span() -> Iterator[EngineSpan | None]:
    """The span of an engine call, None without a trace. The caller ends it, unless the block raises."""
    trace = current_trace.get()
    span = trace.engine("engine") if trace is not None else None
    try:
        yield span
    except BaseException:
        if span is not None:
            span.end(is_error=True)
        raise


class TracedRelay:
    """A Relay over another one, with a span for each inference, whose traceparent is sent to the engine."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def send(self, call: Call[A], *, deadline: float | None) -> A:
        with engine_span() as span:
            if span is None:
                return await self._relay.send(call, deadline=deadline)
            answer = await self._relay.send(_with_parent(call, span), deadline=deadline)
        span.end(code=answer.status_code, is_error=answer.is_fault)
        return answer

    async def stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        """The span ends with the last chunk."""
        with engine_span() as span:
            if span is None:
                return await self._relay.stream(call, deadline=deadline)
            stream = await self._relay.stream(_with_parent(call, span), deadline=deadline)
        chunks = _until_end(stream, span)
        await anext(chunks)  # an empty chunk: from here on, closing the generator reaches its finally
        return replace(stream, chunks=chunks)

    async def open_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> GrpcStream:
        """Unchanged: a stream has many requests, and one traceparent for all."""
        return await self._relay.open_stream(method, metadata, deadline=deadline)


async def _until_end(stream: HttpStream, span: EngineSpan) -> AsyncGenerator[bytes, None]:
    is_error = True
    try:
        yield b""
        async for chunk in stream.chunks:
            yield chunk
        is_error = stream.status >= MIN_HTTP_FAULT
    finally:
        span.end(code=stream.status, is_error=is_error)
        await stream.chunks.aclose()


def _with_parent(call: K, span: EngineSpan) -> K:
    return call.with_headers(span.headers, dropped=PARENT_HEADERS)


def trace_stages(*stages: tuple[str, float]) -> None:
    """Adds stages, (name, seconds), to the current request's trace, if there is one."""
    trace = current_trace.get()
    if trace is not None:
        trace.stages(stages)


def trace_preparation(timings: Timings) -> None:
    """Adds the stages queue, decode and preprocess to the current request's trace."""
    trace_stages(("queue", timings.queue), ("decode", timings.decode), ("preprocess", timings.preprocess))
