"""One bidirectional call to an engine's gRPC port."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress

import grpc
from tritonclient.grpc import service_pb2

from server.backends.http2_calls import GRACE_S
from server.backends.last_word import LastWord, StreamCall
from server.backends.out_of_memory import SHARED_MEMORY_FULL, means_shared_memory_full
from server.core.errors import DeadlineExceeded
from server.core.relay import GrpcAnswer, GrpcMetadata

Judge = Callable[[grpc.StatusCode, str, GrpcMetadata], GrpcAnswer]

MAX_LEAVING = 1024
_ERROR_FIELD = b"\x0a"  # error_message of a ModelStreamInferResponse; an answer begins with another field


class TritonStream:
    """A GrpcStream over grpc.aio. judge: what the end of the call means; it raises where the engine said nothing.

    timeout_s: until its deadline, which the engine is not told. leaving: where it is seen while it is let go.

    Triton 2.51 dies of streams that end at their deadline, or are taken back just as a model answers. One that is left
    is half-closed therefore and read to its end. It is cancelled where that takes longer than GRACE_S, and at once
    while MAX_LEAVING others are read so.
    """

    def __init__(
        self, call: StreamCall, judge: Judge, leaving: "set[asyncio.Task[None]]", timeout_s: float | None = None
    ) -> None:
        self._call = call
        self._judge = judge
        self._leaving = leaving
        self._timeout_s = timeout_s
        self._until = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._is_late = False
        self._is_left = False
        # Tasks of their own: grpc.aio cancels the call at once where one that reads or writes is cancelled.
        self._reading: asyncio.Task[bytes | None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._last_word = LastWord(call)

    async def send(self, message: bytes) -> None:
        """Returns when gRPC has room for more. On a call that has ended it does nothing: receive and end tell of it."""
        self._writing = asyncio.create_task(_unless_ended(self._call.write(message)))
        await asyncio.shield(self._writing)

    async def half_close(self) -> None:
        self._writing = asyncio.create_task(_unless_ended(self._call.done_writing()))
        await asyncio.shield(self._writing)

    async def receive(self) -> bytes | None:
        try:
            async with asyncio.timeout_at(self._until):
                return await self._next()
        except TimeoutError:
            self._is_late = True
            self.cancel()
            return None

    async def end(self) -> GrpcAnswer:
        """Raises BackendUnavailable and DeadlineExceeded."""
        if self._is_late:
            raise DeadlineExceeded(f"the stream's deadline passed, {self._timeout_s:.3f} s after it was opened")
        trailing = tuple((key, value) for key, value in await self._call.trailing_metadata() or ())
        code, details = await self._last_word.told()
        return self._judge(code, details, trailing)

    def cancel(self) -> None:
        if self._is_left or self._call.done():
            return
        self._is_left = True
        if len(self._leaving) >= MAX_LEAVING:
            self._call.cancel()
            return
        leaving = asyncio.create_task(self._let_go())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _let_go(self) -> None:
        try:
            async with asyncio.timeout(GRACE_S):
                if self._writing is not None:
                    await asyncio.wait((self._writing,))
                await self.half_close()
                while await self._next() is not None:
                    pass
        except TimeoutError:
            pass
        finally:
            self._call.cancel()

    async def _next(self) -> bytes | None:
        """The next message; the read goes on where nobody waits for it any more."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        reading = self._reading
        message = await asyncio.shield(reading)
        if self._reading is reading:
            self._reading = None
        return message

    async def _read(self) -> bytes | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError:
            return None
        return _without_keys(message) if isinstance(message, bytes) else None


async def _unless_ended(writing: "Coroutine[None, None, None]") -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await writing


def _without_keys(message: bytes) -> bytes:
    """A response of ModelStreamInfer; an error about shared memory without the key of a region."""
    if not message.startswith(_ERROR_FIELD):
        return message
    error = service_pb2.ModelStreamInferResponse.FromString(message)
    if means_shared_memory_full(error.error_message):
        error.error_message = SHARED_MEMORY_FULL
    return bytes(error.SerializeToString())
