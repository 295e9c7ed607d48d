"""A trace a call, from its message to its end."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from server.tracing.relay import GRPC_ERRORS
from server.tracing.trace import PARENT_HEADERS, Tracer, current_trace

_PROTOCOL = "grpc"
_PROBES = ("ServerLive", "ServerReady", "ModelReady")
_CANCELLED, _UNKNOWN = 1, 2

Method = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]


def traced(tracer: Tracer, name: str, method: Method) -> Method:
    """The method with a trace around each call, under the caller's traceparent. Probes stay as they are."""
    if name in _PROBES:
        return method

    async def serve(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        parents = [
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if key in PARENT_HEADERS and isinstance(value, str)
        ]
        trace = tracer.begin(parents, _PROTOCOL)
        current_trace.set(trace)  # of this call's own task
        code = _UNKNOWN
        try:
            answer = await method(message, context)
            code = 0
            return answer
        except asyncio.CancelledError:
            code = _CANCELLED
            raise
        except grpc.aio.AbortError:
            code = _code_of(context)
            raise
        finally:
            trace.end(name, code=code, is_error=code in GRPC_ERRORS)

    return serve


def _code_of(context: "grpc.aio.ServicerContext[bytes, bytes]") -> int:
    """The number that the call was aborted with; gRPC keeps it as the number or as its name for it."""
    code = context.code()
    number: int = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return number
