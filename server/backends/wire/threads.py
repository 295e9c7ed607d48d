"""Long work on bytes, off the event loop."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_THREAD_FROM_BYTES = 1 << 17  # of JSON, about two milliseconds


def is_short(size_bytes: int) -> bool:
    """Whether work on so many bytes may be done on the event loop: a call saved where every microsecond counts."""
    return size_bytes < _THREAD_FROM_BYTES


async def in_thread(size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """work(…), in a thread where so many bytes would hold up the event loop."""
    if size_bytes < _THREAD_FROM_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
