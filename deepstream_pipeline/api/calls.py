"""Calls of the pipeline's blocking methods from the API's loop: a thread each, few at once, each with a deadline.

A call that hangs holds its place and its thread, and nothing else: whoever asks meanwhile is told so at once.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from deepstream_pipeline.api.answers import Refusal

T = TypeVar("T")


class Calls:
    """So many calls at once, from one event loop. timeout_s: what a call's asker waits at most."""

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit, self._timeout_s = limit, timeout_s
        self._running = 0
        self._waiting: set[asyncio.Future[Any]] = set()  # whatever the calls return
        self._is_closed = False

    async def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises. Raises Refusal (503) where it takes too long, or too many are running."""
        if self._is_closed:
            raise Refusal(503, "the program is ending")
        if self._running >= self._limit:
            raise Refusal(503, f"{self._running} calls of the pipeline are running (limit {self._limit}); retry")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._running += 1
        self._waiting.add(answer)
        threading.Thread(target=self._work, args=(loop, call, answer), name="api-call", daemon=True).start()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise Refusal(503, f"the pipeline did not answer within {self._timeout_s:g} s; retry") from None
        finally:
            self._waiting.discard(answer)

    def close(self) -> None:
        """Answer everybody who waits, and take no more calls."""
        self._is_closed = True
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(Refusal(503, "the program is ending"))

    def _work(self, loop: asyncio.AbstractEventLoop, call: Callable[[], T], answer: asyncio.Future[T]) -> None:
        settle: Callable[[], None]
        try:
            settle = partial(answer.set_result, call())
        except Exception as error:  # noqa: BLE001  # a thread's root: the asker is told
            settle = partial(answer.set_exception, error)
        try:
            loop.call_soon_threadsafe(self._settle, answer, settle)
        except RuntimeError:  # the loop ended meanwhile, and with it who asked
            return

    def _settle(self, answer: asyncio.Future[T], settle: Callable[[], None]) -> None:
        self._running -= 1
        if not answer.done():
            settle()
