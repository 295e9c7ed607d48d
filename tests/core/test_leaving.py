"""Where a caller was that left: by the room that knows, at once or when it hears of it."""

import asyncio

from server.core.leaving import LeftAt, ToldLater, leaving, left_at, when_known


def test_first_room_to_know_is_believed() -> None:
    """The cancellation passes through the others, which would say less."""
    cancelled = asyncio.CancelledError()
    assert left_at(cancelled) is None
    leaving(cancelled, LeftAt.QUEUE)
    leaving(cancelled, LeftAt.DECODE)
    assert left_at(cancelled) is LeftAt.QUEUE


def test_who_counts_is_told_once_whenever_it_is_known() -> None:
    """At once where nobody or somebody knows; later where another process does, before or after it was asked."""
    told: list[LeftAt] = []
    when_known(asyncio.CancelledError(), LeftAt.ENGINE, told.append)
    known = asyncio.CancelledError()
    leaving(known, LeftAt.BATCH)
    when_known(known, LeftAt.ENGINE, told.append)
    assert told == [LeftAt.ENGINE, LeftAt.BATCH]

    later, asked_first = ToldLater(), asyncio.CancelledError()
    leaving(asked_first, later)
    when_known(asked_first, LeftAt.ENGINE, told.append)
    assert len(told) == 2
    later.tell(LeftAt.QUEUE)
    later.tell(LeftAt.ENGINE)
    assert told[2:] == [LeftAt.QUEUE]

    sooner, told_first = ToldLater(), asyncio.CancelledError()
    leaving(told_first, sooner)
    sooner.tell(LeftAt.DECODE)
    when_known(told_first, LeftAt.ENGINE, told.append)
    assert told[3:] == [LeftAt.DECODE]
