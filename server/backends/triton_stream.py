"""One bidirectional call to an engine's gRPC port."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import TypeAlias, TypeVar

import grpc

from server.core.errors import BackendUnavailable
from server.core.relay import GrpcAnswer, GrpcMetadata

StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
Judge = Callable[[grpc.StatusCode, str, GrpcMetadata], GrpcAnswer]
T = TypeVar("T")

LAST_WORD_S = 0.5
# What grpc.aio says by itself of a write that the end of the call overtook; the engine's own word comes a moment later.
_OVERTAKEN = "Internal error from Core"


class TritonStream:
    """A GrpcStream over grpc.aio. judge: what the end of the call means; it raises where the engine said nothing."""

    def __init__(self, call: StreamCall, judge: Judge) -> None:
        self._call = call
        self._judge = judge
        self._words: asyncio.Queue[tuple[grpc.StatusCode, str]] = asyncio.Queue()
        self._call.add_done_callback(self._hear)  # each time that the call's status is set

    async def send(self, message: bytes) -> None:
        """Returns when gRPC has room for more. On a call that has ended it does nothing: receive and end tell of it."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def half_close(self) -> None:
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def receive(self) -> bytes | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError:
            return None
        return message if isinstance(message, bytes) else None

    async def end(self) -> GrpcAnswer:
        """Raises BackendUnavailable and DeadlineExceeded."""
        trailing = tuple((key, value) for key, value in await self._call.trailing_metadata() or ())
        code, details = await self._last_word()
        return self._judge(code, details, trailing)

    def cancel(self) -> None:
        self._call.cancel()

    def _hear(self, _: object) -> None:
        self._words.put_nowait((_told(self._call.code()), _told(self._call.details())))

    async def _last_word(self) -> tuple[grpc.StatusCode, str]:
        until = time.monotonic() + LAST_WORD_S
        while True:
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    code, details = await self._words.get()
            except TimeoutError:
                raise BackendUnavailable("the engine's stream ended without a word; open it again") from None
            if details != _OVERTAKEN:
                return code, details


def _told(word: "Coroutine[None, None, T]") -> T:
    """The result of a coroutine that has nothing to wait for, as of a call that is done."""
    try:
        word.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("a call that is done has its status")
