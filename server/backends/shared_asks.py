"""A question that many put at once is asked once."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from server.core.errors import DeadlineExceeded

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Asked(Generic[V]):
    """A question under way, and how many wait for its answer."""

    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.waiters = 0


class SharedAsks(Generic[K, V]):
    """Whoever asks while the same question is under way gets that answer, or that error; nothing is kept of it.

    Each waits no longer than its own time allows, and leaves alone: the question ends with the last who waits for it.
    """

    def __init__(self) -> None:
        self._under_way: dict[K, _Asked[V]] = {}

    async def ask(self, key: K, question: Callable[[], Coroutine[Any, Any, V]], *, timeout_s: float | None) -> V:
        """The answer. timeout_s: the asker's, None for none. Raises DeadlineExceeded, and what the question does."""
        asked = self._under_way.get(key)
        if asked is None:
            asked = self._under_way[key] = _Asked(asyncio.create_task(question()))
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

    def _ended(self, key: K, asked: "_Asked[V]", task: asyncio.Task[V]) -> None:
        self._forget(key, asked)
        if not task.cancelled():
            task.exception()  # looked at, for where the last who waited left in the same moment

    def _forget(self, key: K, asked: "_Asked[V]") -> None:
        """Who asks from now on asks anew."""
        if self._under_way.get(key) is asked:
            del self._under_way[key]
