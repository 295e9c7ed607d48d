"""Work that nobody waits for any more is not done."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from server.rest.errors import ClientDisconnected

T = TypeVar("T")


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises; cancelled, and ClientDisconnected raised, once the client is gone.

    Call it when the body has been read: what receive still gives is thrown away.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("run_until_disconnect needs a running task")
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
