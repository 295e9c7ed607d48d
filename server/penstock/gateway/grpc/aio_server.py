"""A grpc.aio server with registered methods: a malformed method name from the network cannot stop it.

grpcio 1.85 decodes every call's method name in its only accept loop, which a name that is not UTF-8 ends. So the served
methods are registered with gRPC's core, which compares bytes, and have their own accept loops here. Other calls get
UNIMPLEMENTED.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Protocol

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from penstock.protocol.call import GrpcMetadata

HOT_METHOD = b"/ModelInfer"
# Concurrent requests for calls to gRPC's core, which returns one call each. With one task, the calls of 32 clients
# arrived one or two per loop iteration and formed batches of 3 rows; with 16 batches have 11 rows, at less cost.
ACCEPT_TASKS = 16
MAX_METADATA_BYTES = 64 << 10  # as for REST's heads; gRPC by default refuses at random above 8 KiB, and always above 16
_ENTRY_BYTES = 32  # overhead that HTTP/2 adds to the size of each name and value
ABANDONED = "given up"
"""Cancel a call's work with this message, and the call ends, not its work alone."""


class MetadataLimit(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Limits the metadata read for a call to MAX_METADATA_BYTES, and ends a larger call.

    gRPC's core refuses such a call with RESOURCE_EXHAUSTED, but delivers it nevertheless. By HPACK's table one byte can
    refer to a header of 4 kB: a call of 4 kB became 16 MB of Python strings and took 20 ms. Replaces gRPC's type of a
    metadata entry from `begin` to `end`, while nothing else runs. The first code after reading the metadata calls
    `end`: the first interceptor, or else the first generic handler.
    """

    def __init__(self) -> None:
        self._left_bytes = 0
        self._entry = cygrpc._Metadatum

    def begin(self) -> None:
        """Begins before a call's metadata is read."""
        self._left_bytes = MAX_METADATA_BYTES
        cygrpc._Metadatum = self._read

    def end(self) -> None:
        """Ends the limit, after the metadata was read."""
        cygrpc._Metadatum = self._entry

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """Ends the limit, as a generic handler without methods."""
        self.end()

    def _read(self, name: str, value: str | bytes) -> object:
        self._left_bytes -= len(name) + len(value) + _ENTRY_BYTES
        if self._left_bytes < 0:
            raise asyncio.CancelledError(ABANDONED)  # for other errors grpcio prints tracebacks
        return self._entry(name, value)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[object, object]]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[object, object]":
        self.end()
        return await continuation(handler_call_details)


_metadata_limit = MetadataLimit()


class AcceptedCall:
    """A call that was accepted from gRPC's core and is not served yet."""

    def __init__(self, state: object, loop: asyncio.AbstractEventLoop) -> None:
        self._context = cygrpc._ServicerContext(state, None, None, loop)

    def peer(self) -> str:
        """gRPC's name of its peer."""
        return str(self._context.peer())

    def metadata(self) -> GrpcMetadata:
        """The call's metadata; empty if it is too large."""
        _metadata_limit.begin()
        try:
            return tuple((name, value) for name, value in self._context.invocation_metadata())
        except (asyncio.CancelledError, UnicodeDecodeError):
            return ()
        finally:
            _metadata_limit.end()


class DropPolicy(Protocol):
    """Decides which calls are cancelled as soon as they are accepted. is_active: whether the check is needed at all."""

    @property
    def is_active(self) -> bool: ...

    def drops(self, method: str, call: AcceptedCall) -> bool: ...


def create_aio_server(
    handlers: Sequence[object],
    methods: Iterable[str],
    *,
    interceptors: "Sequence[grpc.aio.ServerInterceptor[object, object]]",
    options: Sequence[tuple[str, int]],
    drop_policy: DropPolicy | None = None,
) -> grpc.aio.Server:
    """A server that does not listen yet. methods: "/package.Service/Method" of all that the handlers serve."""
    server = grpc.aio.server(interceptors=interceptors, options=options)
    core = _AioServer(asyncio.get_running_loop(), list(handlers), tuple(interceptors), tuple(options), drop_policy)
    core.add_registered_method_handlers(dict.fromkeys(methods))
    server._server = core  # type: ignore[attr-defined]
    return server


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """The server under grpc.aio's, whose own accept loop gets no calls."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handlers: list[object],
        interceptors: "tuple[grpc.aio.ServerInterceptor[object, object], ...]",
        options: tuple[tuple[str, int], ...],
        drop_policy: DropPolicy | None,
    ) -> None:
        super().__init__(loop, None, handlers, interceptors, options, None)
        self._running_loop = loop
        self._drop_policy = drop_policy
        first = (_metadata_limit, *interceptors) if interceptors else ()
        self._known = (cygrpc._MethodResolver([_metadata_limit, *handlers], {}), first)
        self._unknown = (cygrpc._MethodResolver([_metadata_limit], {}), ())
        self._calls: set[asyncio.Task[None]] = set()

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Task[None]:
        """Waits for the next call. method: None accepts calls of unregistered names."""
        takers = ACCEPT_TASKS if method is not None and method.endswith(HOT_METHOD) else 1
        return self._running_loop.create_task(self._take_side_by_side(method, takers))

    async def _take_side_by_side(self, method: bytes | None, takers: int) -> None:
        await asyncio.gather(*[self._take_calls(method) for _ in range(takers)])

    async def _take_calls(self, method: bytes | None) -> None:
        """Accepts calls until the server stops, which raises gRPC's error."""
        name = method.decode() if method is not None else ""
        resolver, interceptors = self._known if method is not None else self._unknown
        loop, policy = self._running_loop, self._drop_policy
        while True:
            state = await (self._request_registered_call(method) if method is not None else self._request_call())
            if policy is not None and policy.is_active and policy.drops(name, AcceptedCall(state, loop)):
                del state  # gRPC's core cancels a call without references
                continue
            call = _RunningCall(cygrpc._handle_rpc(name, resolver, interceptors, state, loop, False))
            call.task = task = loop.create_task(cygrpc._schedule_rpc_coro(call.served(), state, loop, name))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            del state, call, task  # frees a finished call now, not with the next one


class _RunningCall:
    """One call. task: waits for the client to leave or for its cancellation, and keeps the call open meanwhile."""

    __slots__ = ("_work", "task")

    def __init__(self, work: Coroutine[None, None, None]) -> None:
        self._work = work
        self.task: asyncio.Task[None] | None = None

    async def served(self) -> None:
        """Serves the call; if its work is abandoned, the call ends although its client is connected."""
        try:
            _metadata_limit.begin()
            await self._work
        except asyncio.CancelledError as cancelled:
            if self.task is not None and ABANDONED in cancelled.args:
                self.task.cancel()
            raise
        finally:
            _metadata_limit.end()  # for metadata that could not be read
            self.task = None  # breaks the reference cycle, which would keep the call open until garbage collection
