"""The question whether an engine answers: one at a time, with a time of its own, that can be told to hurry."""

import asyncio
from collections.abc import Awaitable, Callable


class Probe:
    """Make it inside the running loop. ask: whether the engine answers; it may take for ever."""

    def __init__(self, ask: Callable[[], Awaitable[bool]]) -> None:
        self._ask = ask
        self._limit: asyncio.Timeout | None = None

    async def is_answered(self, patience_s: float) -> bool:
        """Whether the engine answers within that time."""
        try:
            async with asyncio.timeout(patience_s) as self._limit:
                return await self._ask()
        except TimeoutError:
            return False
        finally:
            self._limit = None

    def hurry(self, patience_s: float) -> bool:
        """The question that is being asked has no more than that time from now on. Whether one is."""
        if self._limit is None:
            return False
        at, ends = asyncio.get_running_loop().time() + patience_s, self._limit.when()
        if ends is None or at < ends:
            self._limit.reschedule(at)
        return True
