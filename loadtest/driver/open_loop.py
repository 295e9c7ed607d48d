"""The open loop: requests go at their moments, whatever the answers do.

So a server that stands still is asked as often as one that does not, and whoever would have waited is counted:
latency runs from the intended moment. What falls due together (after a stall, in a burst) goes in one wake-up.
"""

import asyncio
from collections.abc import Iterator

from loadtest.driver.asking import Asking, answered_in_time
from loadtest.driver.timer import Alarm, MakeAlarm, make_alarm

GRACE_S = 5.0  # what a busy machine may add to a deadline that a client keeps
Due = tuple[int, float]


class OpenLoop:
    """One schedule being kept. due: each request's number and its moment on the clock, in order."""

    def __init__(
        self, asking: Asking, due: Iterator[Due], *, max_in_flight: int, alarms: MakeAlarm = make_alarm
    ) -> None:
        self._asking = asking
        self._due = due
        self._next = next(due, None)
        self._max_in_flight = max_in_flight
        self._make_alarm = alarms
        self._pending = 0  # tasks that were made and have not ended; those made just now are not in flight yet

    async def run(self, *, timeout_s: float) -> None:
        """Sends all, then waits for what is under way: at most timeout_s, which the clients keep, and a grace.

        Raises DriverError after that, and an ExceptionGroup of what a client raised; a client should do neither.
        """
        loop = asyncio.get_running_loop()
        scheduled: asyncio.Future[None] = loop.create_future()
        async with answered_in_time(self._asking) as limit, asyncio.TaskGroup() as group:
            alarm = self._make_alarm(lambda: self._send_due(alarm, group, scheduled))
            try:
                self._send_due(alarm, group, scheduled)
                await scheduled
            finally:
                alarm.close()
            limit.reschedule(loop.time() + timeout_s + GRACE_S)

    def _send_due(self, alarm: Alarm, group: asyncio.TaskGroup, scheduled: "asyncio.Future[None]") -> None:
        if scheduled.done():  # cancelled
            return
        now = self._asking.clock()
        while self._next and self._next[1] <= now:
            self._send(group, *self._next)
            self._next = next(self._due, None)
        if self._next:
            alarm.set(self._next[1])
        else:
            scheduled.set_result(None)

    def _send(self, group: asyncio.TaskGroup, number: int, intended_s: float) -> None:
        if self._pending >= self._max_in_flight:
            limit = f"{self._pending} requests in flight (limit {self._max_in_flight})"
            self._asking.give_up(number, intended_s, limit)
            return
        self._pending += 1
        group.create_task(self._ask(number, intended_s))

    async def _ask(self, number: int, intended_s: float) -> None:
        try:
            await self._asking.ask(number, intended_s)
        finally:
            self._pending -= 1
