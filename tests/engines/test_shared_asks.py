"""A question that many put at once is asked once, and everybody has his own end of it."""

import asyncio
import gc
from dataclasses import dataclass, field

import pytest

from penstock.engines.concurrency import CallCoalescer
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable

AGES_S = 60.0


@dataclass
class Slow:
    """A question whose answer comes when `ends` is set. asked, cancelled: how often that happened to it."""

    ends: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    asked: int = 0
    cancelled: int = 0

    async def __call__(self) -> int:
        self.asked += 1
        try:
            await self.ends.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.asked


async def waiting(shared: CallCoalescer[str, int], slow: Slow, *, number: int = 1) -> list[asyncio.Task[int]]:
    """So many who ask, all of them at it."""
    tasks = [asyncio.create_task(shared.ask("key", slow, timeout_s=None)) for _ in range(number)]
    while not slow.asked:
        await asyncio.sleep(0)
    return tasks


async def test_many_who_ask_at_once_have_one_answer() -> None:
    """One question for all of them; who asks when it is answered asks anew."""
    shared, slow = CallCoalescer[str, int](), Slow()
    tasks = await waiting(shared, slow, number=50)
    slow.ends.set()
    assert await asyncio.gather(*tasks) == [1] * 50
    assert await shared.ask("key", slow, timeout_s=None) == 2


async def test_other_questions_are_asked_by_themselves() -> None:
    """By their key."""
    shared, slow = CallCoalescer[str, int](), Slow()
    slow.ends.set()
    await asyncio.gather(*(shared.ask(key, slow, timeout_s=None) for key in "abc"))
    assert slow.asked == 3


async def test_caller_that_leaves_does_not_end_the_call_but_the_last_does() -> None:
    """Also the first, for whom it was asked."""
    shared, slow = CallCoalescer[str, int](), Slow()
    first, second = await waiting(shared, slow, number=2)
    first.cancel()
    await asyncio.wait((first,))
    assert (first.cancelled(), second.done(), slow.cancelled) == (True, False, 0)
    second.cancel()
    await asyncio.wait((second,))
    await asyncio.sleep(0)
    assert (slow.asked, slow.cancelled) == (1, 1)


async def test_each_waits_as_long_as_its_own_time_allows() -> None:
    """A caller whose timeout passes gets an error; the other gets the answer."""
    shared, slow = CallCoalescer[str, int](), Slow()
    (patient,) = await waiting(shared, slow)
    with pytest.raises(DeadlineExceeded):
        await shared.ask("key", slow, timeout_s=-1.0)
    slow.ends.set()
    assert (await patient, slow.asked) == (1, 1)


async def test_call_without_waiting_callers_is_not_joined() -> None:
    """It is about to end: who comes then asks anew."""
    shared, slow = CallCoalescer[str, int](), Slow()
    with pytest.raises(DeadlineExceeded):
        await shared.ask("key", slow, timeout_s=-1.0)
    slow.ends.set()
    assert await shared.ask("key", slow, timeout_s=AGES_S) == slow.asked


async def test_failure_is_everybodys_and_is_not_kept() -> None:
    """The next asks anew."""
    shared, slow = CallCoalescer[str, int](), Slow(error=EngineUnavailable("gone"))
    tasks = await waiting(shared, slow, number=3)
    slow.ends.set()
    assert {type(found) for found in await asyncio.gather(*tasks, return_exceptions=True)} == {EngineUnavailable}
    slow.error = None
    assert await shared.ask("key", slow, timeout_s=None) == 2


async def test_failure_without_waiting_callers_is_not_logged_by_the_loop() -> None:
    """The last left in the moment in which it failed."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    shared, slow = CallCoalescer[str, int](), Slow(error=EngineUnavailable("gone"))
    (only,) = await waiting(shared, slow)
    slow.ends.set()
    await asyncio.sleep(0)
    only.cancel()
    await asyncio.wait((only,))
    del only
    gc.collect()
    assert complaints == []
