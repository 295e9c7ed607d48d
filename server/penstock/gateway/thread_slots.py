"""Threads for long work with much memory: a limited number at a time, with fair queueing between clients."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from penstock.gateway.engine_slots import SlotQueue
from penstock.protocol.errors import DeadlineExceeded

THREADS_AT_ONCE = max(2, min(8, os.cpu_count() or 1))
T = TypeVar("T")


class ThreadSlot:
    """One client's slot. A thread cannot be cancelled: the slot is free again when its thread has ended."""

    def __init__(self, what: str, deadline: float | None) -> None:
        self._what, self._deadline = what, deadline
        self.work: asyncio.Task[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Runs the work in a thread, once. Raises DeadlineExceeded, and what the work raises."""
        task = self.work = asyncio.create_task(asyncio.to_thread(work))
        task.add_done_callback(_retrieve)
        left_s = None if self._deadline is None else self._deadline - time.monotonic()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    return await asyncio.shield(task)
        finally:  # an error's traceback refers to this frame: a cycle would retain the work's pictures
            if task.done():
                self.work = None
            del task
        raise DeadlineExceeded(f"the deadline passed while {self._what}; allow more time")


class ThreadSlots:
    """Limits concurrent threads to `limit`; clients take turns."""

    def __init__(self, limit: int, *, what: str, others: str) -> None:
        """For messages. what: "the picture was drawn". others: "the pictures that are drawn before it"."""
        self._what, self._others = what, others
        self._queue = SlotQueue(limit)

    @property
    def held(self) -> int:
        """Occupied slots."""
        return self._queue.held

    @asynccontextmanager
    async def slot(self, client: str, deadline: float | None) -> AsyncIterator[ThreadSlot]:
        """A slot, until the block and its thread end. Raises DeadlineExceeded if none is free in time."""
        await self._queue.enter(client, 1, deadline, self._others)
        slot = ThreadSlot(self._what, deadline)
        try:
            yield slot
        finally:
            if slot.work is None:
                self._queue.leave(1)
            else:
                slot.work.add_done_callback(lambda _: self._queue.leave(1))

    async def run(self, work: Callable[[], T], *, client: str, deadline: float | None) -> T:
        """Runs the work in a slot. Raises DeadlineExceeded, and what the work raises."""
        async with self.slot(client, deadline) as slot:
            return await slot.run(work)


def _retrieve(work: "asyncio.Task[Any]") -> None:
    if not work.cancelled():
        work.exception()  # the caller may be gone; asyncio logs errors that were never retrieved
