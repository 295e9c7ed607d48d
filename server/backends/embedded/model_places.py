"""Who may run a model now, and who waits: as many at once as it has instances, first come, first served."""

import asyncio
import time
from collections import deque

from server.core.errors import DeadlineExceeded, InferenceError, Overloaded

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0


class Places:
    """Of one event loop. count: requests that run at once. max_waiting: further ones that may wait."""

    def __init__(self, model_name: str, *, count: int, max_waiting: int) -> None:
        self._model_name = model_name
        self._count = count
        self._max_waiting = max_waiting
        self._free = count
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._held_s = 0.0

    @property
    def waiting(self) -> int:
        return sum(not waiter.done() for waiter in self._waiters)

    async def take(self, deadline: float | None) -> None:
        """Wait for a place; give_back returns it. deadline: monotonic seconds.

        Raises Overloaded where too many wait already, DeadlineExceeded, and what `close` was given.
        """
        if deadline is not None and deadline <= time.monotonic():
            raise DeadlineExceeded(f"the deadline passed before model {self._model_name!r} could be asked")
        if self._free > 0:
            self._free -= 1
            return
        waiting = self.waiting
        if waiting >= self._max_waiting:
            raise self._overloaded(waiting)
        await self._wait(deadline)

    def give_back(self, held_s: float) -> None:
        """The next one in line, or the pool, gets the place that was held so long."""
        self._held_s = held_s if self._held_s == 0 else 0.8 * self._held_s + 0.2 * held_s
        self._hand_on()

    def close(self, error: InferenceError) -> None:
        """All who wait get the error."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)

    async def _wait(self, deadline: float | None) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        started = time.monotonic()
        try:
            async with asyncio.timeout(None if deadline is None else deadline - started):
                await waiter
        except TimeoutError:
            self._leave(waiter)
            raise DeadlineExceeded(
                f"the deadline passed while the request waited {time.monotonic() - started:.3f} s for an instance of "
                f"model {self._model_name!r} (it has {self._count})"
            ) from None
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: "asyncio.Future[None]") -> None:
        """Out of the line; a place that came at the same moment goes on."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif not waiter.cancelled() and waiter.exception() is None:
            self._hand_on()

    def _hand_on(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1

    def _overloaded(self, waiting: int) -> Overloaded:
        wait_s = waiting * self._held_s / self._count
        retry_after_s = min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)
        return Overloaded(
            f"{waiting} requests wait for an instance of model {self._model_name!r} (limit {self._max_waiting}); "
            f"retry after {retry_after_s:.1f} s",
            retry_after_s=retry_after_s,
        )
