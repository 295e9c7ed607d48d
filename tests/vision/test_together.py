"""Pieces of one request's work end together."""

import asyncio

import pytest

from penstock.protocol.cancellation import CancelStage, cancel_stage_of, note_cancel_stage
from penstock.protocol.errors import InvalidRequest
from penstock.vision.image_tasks import gather_or_cancel


async def noting(where: CancelStage | None) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError as cancelled:
        if where is not None:
            note_cancel_stage(cancelled, where)
        raise


@pytest.mark.parametrize("jobs", [1, 3])
async def test_caller_that_leaves_is_known_by_where_its_pieces_were(jobs: int) -> None:
    """A request of several images waits in the queue, too."""
    pieces = [noting(CancelStage.QUEUE) for _ in range(jobs)]
    leaver = asyncio.create_task(gather_or_cancel(pieces))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaver.cancel()

    with pytest.raises(asyncio.CancelledError) as cancelled:
        await leaver

    assert cancel_stage_of(cancelled.value) is CancelStage.QUEUE


async def test_first_failure_ends_the_others_and_is_raised_as_itself() -> None:
    """One image of several that is wrong is the request's error, not a group of errors."""

    async def wrong() -> None:
        raise InvalidRequest("wrong")

    with pytest.raises(InvalidRequest, match="wrong"):
        await gather_or_cancel([noting(None), wrong()])
