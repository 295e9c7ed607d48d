"""Pieces of one request's work, side by side."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from server.core.errors import InferenceError
from server.core.leaving import LeftAt, ToldLater, leaving, left_at

T = TypeVar("T")


async def together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All of them at once; the first InferenceError cancels the others and is raised as itself.

    Where the caller leaves, what the first of them noted of where it was stands on the CancelledError here, too.
    """
    if len(jobs) == 1:
        return [await jobs[0]]
    left: list[LeftAt | ToldLater] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_noting(job, left)) for job in jobs]
    except asyncio.CancelledError as cancelled:
        if left:
            leaving(cancelled, left[0])
        raise
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        if isinstance(first, InferenceError):
            raise first from None
        raise
    return [task.result() for task in tasks]


async def _noting(job: Coroutine[Any, Any, T], left: list[LeftAt | ToldLater]) -> T:
    try:
        return await job
    except asyncio.CancelledError as cancelled:
        where = left_at(cancelled)
        if where is not None:
            left.append(where)
        raise
