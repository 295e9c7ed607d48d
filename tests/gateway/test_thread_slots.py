"""Threads for large work: few at a time, and a slot is free only when its thread has ended."""

import asyncio
import gc
import threading
import time
import weakref
from contextlib import suppress

import pytest

from penstock.gateway.thread_slots import ThreadSlots
from penstock.protocol.errors import DeadlineExceeded, EngineFailed
from tests.support.waiting import until


@pytest.fixture
def slots() -> ThreadSlots:
    """One slot."""
    return ThreadSlots(1, what="the cake was baked", others="the cakes before it")


async def test_run_gives_the_result_and_the_slot_back(slots: ThreadSlots) -> None:
    """Also after an error, which reaches the caller."""

    def fail() -> None:
        raise EngineFailed("burnt")

    assert await slots.run(lambda: threading.current_thread().name, client="a", deadline=None) != "MainThread"
    with pytest.raises(EngineFailed, match="burnt"):
        await slots.run(fail, client="a", deadline=None)
    assert slots.held == 0


async def test_slot_of_a_cancelled_caller_is_held_until_its_thread_ends(slots: ThreadSlots) -> None:
    """A thread cannot be stopped, so its memory is still in use; the next caller waits for it."""
    started, ends = threading.Event(), threading.Event()

    def bake() -> None:
        started.set()
        ends.wait(30)

    first = asyncio.create_task(slots.run(bake, client="a", deadline=None))
    await asyncio.to_thread(started.wait, 30)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert slots.held == 1
    with pytest.raises(DeadlineExceeded, match="waiting for the cakes before it"):
        await slots.run(bake, client="b", deadline=time.monotonic() + 0.05)
    second = asyncio.create_task(slots.run(lambda: "done", client="b", deadline=None))
    ends.set()
    assert await second == "done"

    async def is_free() -> bool:
        return slots.held == 0

    await until(is_free)


async def test_run_past_its_deadline_says_what_was_late(slots: ThreadSlots) -> None:
    """The caller gets its answer at the deadline."""
    ends = threading.Event()
    with pytest.raises(DeadlineExceeded, match="the deadline passed while the cake was baked; allow more time"):
        await slots.run(lambda: ends.wait(30), client="a", deadline=time.monotonic() + 0.05)
    ends.set()


async def test_slot_without_work_is_given_back(slots: ThreadSlots) -> None:
    """An error before the thread is started leaves nothing behind."""

    async def fail() -> None:
        async with slots.slot("a", None):
            assert slots.held == 1
            raise EngineFailed("no eggs")

    with pytest.raises(EngineFailed, match="no eggs"):
        await fail()
    assert slots.held == 0


async def test_error_of_the_work_retains_nothing(slots: ThreadSlots) -> None:
    """What the work held is freed with its error, without the garbage collector."""

    class Large:
        """Stands for a picture."""

    held: list[weakref.ref[Large]] = []

    def fail() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise EngineFailed("burnt")

    gc.disable()
    try:
        with suppress(EngineFailed):
            await slots.run(fail, client="a", deadline=None)
        await asyncio.sleep(0)
        assert held[0]() is None
    finally:
        gc.enable()
