"""gRPC calls and streams that a worker process forwards to the core process."""

import asyncio
import time

from grpc import StatusCode

from penstock.gateway.grpc.interceptors import caller_of, metadata_of
from penstock.gateway.grpc.relay import NO_MORE_REQUESTS, CallRelay, ClientStream, Context, StreamServer, deadline_of
from penstock.gateway.grpc.status_codes import CallStatus, code_of
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.protocol.call import GrpcAnswer, GrpcCall
from penstock.protocol.engine import GrpcStream
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable


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


class StreamForwarder(StreamServer):
    """Bidirectional streams, message by message."""

    def __init__(self, core: CoreRelay) -> None:
        super().__init__()
        self._core = core

    def _opened(self, method: str, context: Context) -> ClientStream:
        deadline = deadline_of(context)
        stream = self._core.open_stream(method, metadata_of(context), caller_of(context))
        return _ForwardedStream(stream, context, deadline)


class _ForwardedStream(ClientStream):
    """A client's stream over a stream to the core."""

    def __init__(self, stream: GrpcStream, context: Context, deadline: float | None) -> None:
        super().__init__(context)
        self._stream = stream
        self._deadline = deadline

    async def run(self) -> CallStatus:
        """The status with which the core ends it.

        Raises DeadlineExceeded, and EngineUnavailable after `cut`, or if a drain has left requests unread.
        """
        up = asyncio.create_task(self._pump_up())
        try:
            async with asyncio.timeout(None if self._deadline is None else self._deadline - time.monotonic()):
                async with self._whole:
                    status = await self._pump_down()
        except TimeoutError:
            if self._whole.expired():
                raise EngineUnavailable("this gateway stopped before all answers came; send to another one") from None
            raise DeadlineExceeded("the stream's deadline passed; allow more time") from None
        finally:
            self._is_over = True
            up.cancel()
            await asyncio.wait((up,))
            self._stream.cancel()
        if self._is_cut_short and status.code is StatusCode.OK:
            raise EngineUnavailable(NO_MORE_REQUESTS)
        return status

    async def _pump_up(self) -> None:
        """Sends the client's messages until it half-closes, or a drain begins."""
        while (message := await self._next_message()) is not None:
            await self._stream.send(message)  # outside the scope that a drain ends: a cancelled write ends the call
        await self._stream.half_close()

    async def _pump_down(self) -> CallStatus:
        await self._context.send_initial_metadata(())  # at once, as in Triton: clients may wait for it
        while (message := await self._stream.receive()) is not None:
            await self._context.write(message)
        answer = await self._stream.end()
        return CallStatus(code_of(answer), answer.details, answer.trailing_metadata)
