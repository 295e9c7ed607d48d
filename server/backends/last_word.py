"""How a stream over grpc.aio ended, by the word of the other side."""

import asyncio
import time
from collections.abc import Coroutine
from typing import TypeAlias, TypeVar

import grpc

from server.core.errors import BackendUnavailable

StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
T = TypeVar("T")

LAST_WORD_S = 0.5
# What grpc.aio says by itself of a write that the end of the call overtook; the other side's word comes a moment later.
_OVERTAKEN = "Internal error from Core"


class LastWord:
    """Hears every status that the call gets, from its beginning on: make it with the call."""

    def __init__(self, call: StreamCall) -> None:
        self._call = call
        self._words: asyncio.Queue[tuple[grpc.StatusCode, str]] = asyncio.Queue()
        call.add_done_callback(self._hear)  # each time that the call's status is set

    async def told(self) -> tuple[grpc.StatusCode, str]:
        """Code and details, waited for. Raises BackendUnavailable where none comes."""
        until = time.monotonic() + LAST_WORD_S
        while True:
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    code, details = await self._words.get()
            except TimeoutError:
                raise BackendUnavailable("the engine's stream ended without a word; open it again") from None
            if details != _OVERTAKEN:
                return code, details

    def _hear(self, _: object) -> None:
        self._words.put_nowait((_told(self._call.code()), _told(self._call.details())))


def _told(word: "Coroutine[None, None, T]") -> T:
    """The result of a coroutine that has nothing to wait for, as of a call that is done."""
    try:
        word.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("a call that is done has its status")
