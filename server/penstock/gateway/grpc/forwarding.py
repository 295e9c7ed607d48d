"""gRPC calls and streams that a worker process forwards to the core process."""

import asyncio
import time

import grpc

from penstock.gateway.grpc.interceptors import caller_of, metadata_of
from penstock.gateway.grpc.relay import CallRelay, Context, deadline_of
from penstock.gateway.grpc.status_codes import CallStatus, code_of, status_of
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.protocol.call import GrpcAnswer, GrpcCall
from penstock.protocol.engine import GrpcStream
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InferenceError


class GrpcForwarder:
    """Unary calls. relay: ends running calls when a drain's grace is over."""

    def __init__(self, core: CoreRelay, relay: CallRelay) -> None:
        self._core = core
        self._relay = relay

    async def call(self, method: str, message: bytes, context: Context) -> bytes:
        """The core's response; an error ends the call."""

        async def work() -> GrpcAnswer:
            call = GrpcCall(method, message, metadata_of(context))
            return await self._core.send(call, caller_of(context), deadline=deadline_of(context))

        return await self._relay.answer(work, context)


class StreamForwarder:
    """Bidirectional streams, message by message. Open ones end by `drain`, in order, or by `cut`, at once."""

    def __init__(self, core: CoreRelay) -> None:
        self._core = core
        self._open: set[_ForwardedStream] = set()
        self._is_draining = False

    async def serve(self, method: str, _: object, context: Context) -> None:
        """Serves one stream, from its first message to its status."""
        try:
            code, details, trailing = await self._passed(method, context)
        except InferenceError as error:
            code, details, trailing = status_of(error)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details, trailing)
        context.set_trailing_metadata(trailing)

    def drain(self) -> None:
        """Stops accepting requests; a stream ends when its requests are answered."""
        self._is_draining = True
        for passing in self._open:
            passing.drain()

    def cut(self) -> None:
        """Ends every stream now, as UNAVAILABLE."""
        for passing in self._open:
            passing.cut()

    async def _passed(self, method: str, context: Context) -> CallStatus:
        deadline = deadline_of(context)
        passing = _ForwardedStream(self._core.open_stream(method, metadata_of(context), caller_of(context)), context)
        self._open.add(passing)
        if self._is_draining:
            passing.drain()
        try:
            return await passing.run(deadline)
        finally:
            self._open.discard(passing)


class _ForwardedStream:
    """A client's stream over a stream to the core."""

    def __init__(self, stream: GrpcStream, context: Context) -> None:
        self._stream = stream
        self._context = context
        self._whole = asyncio.timeout(None)
        self._reading: asyncio.Timeout | None = None
        self._is_draining = False
        self._is_over = False

    async def run(self, deadline: float | None) -> CallStatus:
        """The status with which the core ends it. Raises DeadlineExceeded, and EngineUnavailable after `cut`."""
        up = asyncio.create_task(self._pump_up())
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                async with self._whole:
                    return await self._pump_down()
        except TimeoutError:
            if self._whole.expired():
                raise EngineUnavailable("this gateway stopped before all answers came; send to another one") from None
            raise DeadlineExceeded("the stream's deadline passed; allow more time") from None
        finally:
            self._is_over = True
            up.cancel()
            await asyncio.wait((up,))
            self._stream.cancel()

    def drain(self) -> None:
        """Stops reading requests; the core answers those it has, and then ends the stream. Call it once."""
        self._is_draining = True
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    def cut(self) -> None:
        """Ends now, unless it is ending already."""
        if not self._is_over:
            self._whole.reschedule(asyncio.get_running_loop().time())

    async def _pump_up(self) -> None:
        """Sends the client's messages until it half-closes, or a drain begins."""
        while (message := await self._next_message()) is not None:
            await self._stream.send(message)  # outside the scope that a drain ends: a cancelled write ends the call
        await self._stream.half_close()

    async def _next_message(self) -> bytes | None:
        """The next message; None after the last one."""
        if self._is_draining:
            return None
        try:
            async with asyncio.timeout(None) as self._reading:
                message: object = await self._context.read()
        except TimeoutError:
            return None
        finally:
            self._reading = None
        return message if isinstance(message, bytes) else None

    async def _pump_down(self) -> CallStatus:
        await self._context.send_initial_metadata(())  # at once, as in Triton: clients may wait for it
        while (message := await self._stream.receive()) is not None:
            await self._context.write(message)
        answer = await self._stream.end()
        return CallStatus(code_of(answer), answer.details, answer.trailing_metadata)
