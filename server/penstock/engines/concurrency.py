"""Coalesces identical concurrent calls, and runs long work on bytes in a thread."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

from penstock.protocol.errors import DeadlineExceeded

P = ParamSpec("P")
T = TypeVar("T")
_THREAD_FROM_BYTES = 1 << 17  # of JSON, about two milliseconds


async def in_thread(size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """work(…), in a thread if so many bytes would block the event loop."""
    if size_bytes < _THREAD_FROM_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _SharedCall(Generic[V]):
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.waiters = 0


class CallCoalescer(Generic[K, V]):
    """Coalesces concurrent identical calls: they share one result or error. Results are not cached.

    Each caller has its own timeout. The call is cancelled when its last caller leaves.
    """

    def __init__(self) -> None:
        self._under_way: dict[K, _SharedCall[V]] = {}

    async def ask(self, key: K, question: Callable[[], Coroutine[Any, Any, V]], *, timeout_s: float | None) -> V:
        """The result. timeout_s: of this caller. Raises DeadlineExceeded, and the call's errors."""
        asked = self._under_way.get(key)
        if asked is None:
            asked = self._under_way[key] = _SharedCall(asyncio.create_task(question()))
            asked.task.add_done_callback(lambda task: self._ended(key, asked, task))
        asked.waiters += 1
        try:
            await asyncio.wait((asked.task,), timeout=timeout_s)
            if not asked.task.done():
                raise DeadlineExceeded("the deadline passed while the engine was asked about the model")
            return asked.task.result()
        finally:
            asked.waiters -= 1
            if not asked.waiters:
                self._forget(key, asked)
                asked.task.cancel()

    def _ended(self, key: K, asked: "_SharedCall[V]", task: asyncio.Task[V]) -> None:
        self._forget(key, asked)
        if not task.cancelled():
            task.exception()  # marked as retrieved: the last waiter may have left

    def _forget(self, key: K, asked: "_SharedCall[V]") -> None:
        if self._under_way.get(key) is asked:
            del self._under_way[key]
