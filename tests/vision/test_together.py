"""Pieces of one request's work end together."""

import asyncio

import pytest

from server.core.errors import InvalidRequest
from server.core.leaving import LeftAt, leaving, left_at
from server.vision.together import together


async def noting(where: LeftAt | None) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError as cancelled:
        if where is not None:
            leaving(cancelled, where)
        raise


@pytest.mark.parametrize("jobs", [1, 3])
async def test_caller_that_leaves_is_known_by_where_its_pieces_were(jobs: int) -> None:
    """A request of several images waits in the queue, too."""
    pieces = [noting(LeftAt.QUEUE) for _ in range(jobs)]
    leaver = asyncio.create_task(together(pieces))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaver.cancel()

    with pytest.raises(asyncio.CancelledError) as cancelled:
        await leaver

    assert left_at(cancelled.value) is LeftAt.QUEUE


async def test_first_failure_ends_the_others_and_is_raised_as_itself() -> None:
    """One image of several that is wrong is the request's error, not a group of errors."""

    async def wrong() -> None:
        raise InvalidRequest("wrong")

    with pytest.raises(InvalidRequest, match="wrong"):
        await together([noting(None), wrong()])
