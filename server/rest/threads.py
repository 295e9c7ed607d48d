"""Long scans leave the event loop free."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_THREAD_FROM_BYTES = 1 << 20


async def run_scan(size_bytes: int, scan: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """scan(…), in a thread where the text is long enough to hold up the event loop."""
    if size_bytes < _THREAD_FROM_BYTES:
        return scan(*args, **kwargs)
    return await asyncio.to_thread(scan, *args, **kwargs)
