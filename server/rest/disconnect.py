"""Work that nobody waits for any more is not done."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from server.rest.errors import ClientDisconnected
from server.rest.presence import Presence, presence_of

T = TypeVar("T")


async def run_until_disconnect(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises; cancelled, and ClientDisconnected raised, once the client is gone.

    Call it when the body has been read: what receive still gives is thrown away.
    """
    presence = presence_of(scope)
    if presence is None or not presence.is_whole:
        return await _run_received(receive, work)
    if presence.is_gone:
        work.close()
        raise ClientDisconnected
    return await _run_present(presence, work)


async def _run_present(presence: Presence, work: Coroutine[Any, Any, T]) -> T:
    """Told by the connection."""
    task = _current_task()
    is_gone = False

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    presence.watch(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        presence.unwatch()


async def _run_received(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Told by what is received."""
    task = _current_task()
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()


def _current_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("run_until_disconnect needs a running task")
    return task
