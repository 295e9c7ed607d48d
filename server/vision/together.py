"""Pieces of one request's work, side by side."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from server.core.leaving import LeftAt, ToldLater, leaving, left_at

T = TypeVar("T")


async def together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all jobs concurrently; the first error cancels the others and is raised unchanged.

    Does not use a TaskGroup: its errors and tasks refer to each other, so images would stay in memory until the garbage
    collector runs.

    Where the caller leaves, what the first of them noted of where it was stands on the CancelledError here, too.
    """
    if len(jobs) == 1:
        return [await jobs[0]]
    left: list[LeftAt | ToldLater] = []
    tasks = [asyncio.create_task(_noting(job, left)) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError as cancelled:
        await _end(tasks)
        if left:
            leaving(cancelled, left[0])
        raise
    failure = _failure(tasks)
    if failure is None:
        return [task.result() for task in tasks]
    await _end(tasks)
    try:
        raise failure
    finally:  # its traceback refers to this frame and the images, so the frame must not refer to the error
        del failure, tasks


def _failure(tasks: Sequence[asyncio.Task[T]]) -> BaseException | None:
    failed = (task.exception() for task in tasks if task.done() and not task.cancelled())
    return next((error for error in failed if error is not None), None)


async def _end(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Cancels running tasks and waits for them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that the exception was never retrieved


async def _noting(job: Coroutine[Any, Any, T], left: list[LeftAt | ToldLater]) -> T:
    try:
        return await job
    except asyncio.CancelledError as cancelled:
        where = left_at(cancelled)
        if where is not None:
            left.append(where)
        raise
