"""The short question to an engine that is doubted: does it answer anything at all?"""

import asyncio
import time

from server.core.backend import Backend

STOOD_STILL_S = 0.25


async def answers_within(patience_s: float, engine: Backend) -> bool:
    """Whether the engine answers its probe in that time; True, too, where this process stood still itself.

    An answer that came meanwhile would be read too late, and a healthy engine be taken for hung.
    """
    started = time.monotonic()
    try:
        async with asyncio.timeout(patience_s):
            return await engine.ready()
    except TimeoutError:
        return time.monotonic() - started > patience_s + STOOD_STILL_S
