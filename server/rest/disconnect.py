"""Work that nobody waits for any more is not done."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from server.rest.errors import ClientDisconnected
from server.rest.presence import presence_of

T = TypeVar("T")


async def run_until_disconnect(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises; cancelled, and ClientDisconnected raised, once the client is gone.

    Call it when the body has been read: what receive still gives is thrown away.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("run_until_disconnect needs a running task")
    is_gone = False

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    presence = presence_of(scope)
    if presence is None or not presence.is_whole:
        unwatch: Callable[[], object] = asyncio.create_task(_watch(receive, leave)).cancel
    elif presence.is_gone:
        work.close()
        raise ClientDisconnected
    else:
        presence.watch(leave)
        unwatch = presence.unwatch
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        unwatch()


async def _watch(receive: Receive, leave: Callable[[], None]) -> None:
    """For a connection that does not tell by itself."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()
