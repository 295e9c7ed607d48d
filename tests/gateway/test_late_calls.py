"""Calls of models whose batches the gateway does not form, and that would be answered after their deadline."""

import time
from contextlib import ExitStack

import pytest

from penstock.protocol.errors import DeadlineExceeded, Overloaded
from tests.gateway.test_engine_turns import AT_ONCE, Engine, ask, engine, left, settle, turns_of

__all__ = ["engine"]  # the fixture


async def test_call_that_would_end_after_its_deadline_does_not_reach_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's work would be lost, and later calls would be late, too. The next one in turn takes the room."""
    turns, began = turns_of(engine), time.monotonic()
    for _ in range(AT_ONCE):
        ask(turns, "eve")
    await settle()
    alice, bob = ask(turns, "alice", until=began + 10), ask(turns, "bob", until=began + 30)
    await settle()
    monkeypatch.setattr(time, "monotonic", lambda: began + 8)
    engine.answer_one()  # after 8 s
    await settle()
    with pytest.raises(DeadlineExceeded, match=r"less time is left than the 8\.0\d\d s that a call takes"):
        await alice
    assert engine.asked == [b"eve"] * AT_ONCE + [b"bob"]
    for _ in range(AT_ONCE - 1):
        engine.answer_one()
    await left([bob])
    engine.waiting.clear()


async def test_call_with_little_time_is_tried_where_the_engine_is_idle(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slow answer does not refuse all calls after it."""
    turns, began = turns_of(engine), time.monotonic()
    slow = ask(turns, "eve")
    await settle()
    monkeypatch.setattr(time, "monotonic", lambda: began + 8)
    engine.answer_one()
    await slow
    quick = ask(turns, "alice", until=began + 9)
    await settle()
    engine.answer_one()
    assert (await quick).status == 200


async def test_pictures_that_would_be_late_are_refused_before_they_are_decoded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the calls before them and the time of a call; a client that has no others of its own is not refused."""
    turns, began = turns_of(engine), time.monotonic()
    slow = ask(turns, "eve")
    await settle()
    monkeypatch.setattr(time, "monotonic", lambda: began + 2)
    engine.answer_one()  # after 2 s
    await slow
    until = began + 2 + 5  # time for ten pictures, with four calls at once
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(turns.pictures("slow", "eve", 1, until))
        with pytest.raises(Overloaded, match=r"11 pictures of model 'slow' need 5.500 s, and 5.000 s are left"):
            stack.enter_context(turns.pictures("slow", "eve", 1, until))
        stack.enter_context(turns.pictures("slow", "alice", 1, until))
        stack.enter_context(turns.pictures("slow", "eve", 1, None))
    with turns.pictures("slow", "eve", 4, began + 2.1):
        pass  # none is before them: they may be quicker than the last one
