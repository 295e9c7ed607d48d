"""The closed loop: so many callers, each asking again as soon as it is answered.

It finds what a system carries at a concurrency. It hides queueing, so no latency is judged by it: there is no intended
moment but the one at which a caller was free, and a stall costs each caller one long answer.
"""

import asyncio
from collections.abc import Iterator

from loadtest.driver.asking import Asking, answered_in_time
from loadtest.driver.open_loop import GRACE_S
from loadtest.results import Status


async def run_callers(
    asking: Asking, numbers: Iterator[int], *, callers: int, until_s: float, timeout_s: float
) -> None:
    """Asks until that moment of the clock, then waits for what is under way: at most timeout_s and a grace.

    Raises as OpenLoop.run does.
    """

    async def caller() -> None:
        while (now := asking.clock()) < until_s:
            answer = await asking.ask(next(numbers), now)
            if answer.status is not Status.OK:
                await asyncio.sleep(0)  # an answer that needed no waiting must not keep the loop for itself

    remaining_s = max(0.0, until_s - asking.clock())
    async with answered_in_time(asking) as limit, asyncio.TaskGroup() as group:
        limit.reschedule(asyncio.get_running_loop().time() + remaining_s + timeout_s + GRACE_S)
        for _ in range(callers):
            group.create_task(caller())
