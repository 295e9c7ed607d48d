"""What the other rooms see of tracing: a request's trace, begun by a transport, known to whoever works for the request.

A gateway without a collector has no Tracer: transports then begin no trace, and nobody finds one.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Protocol

TraceHeaders = tuple[tuple[str, str], ...]
"""W3C's traceparent and tracestate."""

PARENT_HEADERS = ("traceparent", "tracestate")


class EngineSpan(Protocol):
    """One call to the engine. headers: what the engine is told, so that its own spans hang under this one."""

    @property
    def headers(self) -> TraceHeaders: ...

    def end(self, *, code: int | None = None, is_error: bool = False) -> None:
        """The call is over. code: HTTP's or gRPC's status, None where the engine said nothing."""
        ...


class Trace(Protocol):
    """One request, from its head to its answer. To be used from the event loop's thread."""

    def arrived(self, model: str) -> None:
        """The request for that model was read and let in: until its first stage, or the engine's call, it waits."""
        ...

    def stages(self, stages: Iterable[tuple[str, float]]) -> None:
        """(name, seconds) of what was just done, end to end, the last of which ends now."""
        ...

    def engine(self, name: str) -> EngineSpan:
        """The engine is asked now; what was waited before that becomes the span `queue`."""
        ...

    def end(self, name: str, *, code: int, is_error: bool) -> None:
        """The request was answered. name: of the operation, from a bounded set; code: HTTP's or gRPC's status."""
        ...


class Tracer(Protocol):
    """Begins traces and sends what ended to the collector."""

    def begin(self, headers: Iterable[tuple[str, str]], protocol: str) -> Trace:
        """A request arrived. headers: its traceparent and tracestate where it has them; protocol: http or grpc.

        A trace that is not ended is never sent.
        """
        ...


current_trace: ContextVar[Trace | None] = ContextVar("current_trace", default=None)
"""The trace of the request that this task works for."""


def trace_arrival(model: str) -> None:
    """The request of this task, for that model, has been let in. model: its label, from a bounded set."""
    trace = current_trace.get()
    if trace is not None:
        trace.arrived(model)
