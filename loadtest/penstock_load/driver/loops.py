"""Sends requests in an open loop (by schedule) or a closed loop (a number of callers)."""

import asyncio
import ctypes
import errno
import math
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock_load.clients.client import Answer, Client
from penstock_load.driver.protocol import DriverError
from penstock_load.results import Record, Side, Stages, Status
from penstock_load.scenario import RequestSpec

_SLOTS = 1009  # a prime, so that no count of pictures or processes runs in step with the mix
_NO_STAGES = Stages()


@dataclass(frozen=True, slots=True)
class RequestLane:
    """One kind of request, its name in the records, and the client that sends it."""

    label: str
    client: Client


def mix(asks: Sequence[RequestSpec], *, seed: int) -> list[int]:
    """Which ask a request is, by its number modulo the list's length: shares kept within a thousandth, order by seed.

    Each ask has a place, however small its share.
    """
    total = sum(ask.share for ask in asks)
    slots = [index for index, ask in enumerate(asks) for _ in range(max(1, round(_SLOTS * ask.share / total)))]
    random.Random(seed).shuffle(slots)
    return slots


@dataclass(slots=True)
class Asking:
    """One phase's requests against one side. records: what ended and was not taken yet; clock: monotonic seconds."""

    round: int
    phase: str
    side: Side
    lanes: Sequence[RequestLane]
    slots: Sequence[int]
    epoch_s: float
    clock: Callable[[], float]
    records: list[Record] = field(default_factory=list)
    in_flight: int = 0
    count: int = 0

    async def ask(self, number: int, intended_s: float) -> Answer:
        """Sends the request with that number, which was due at intended_s of the clock; keeps its record."""
        lane = self.lanes[self.slots[number % len(self.slots)]]
        self.in_flight += 1
        sent_s = self.clock()
        try:
            answer = await lane.client.send(number)
        finally:
            self.in_flight -= 1
        self._keep(lane.label, (intended_s, sent_s, self.clock()), answer)
        return answer

    def give_up(self, number: int, intended_s: float, why: str) -> None:
        """Writes down that the request was not sent at all."""
        now = self.clock()
        label = self.lanes[self.slots[number % len(self.slots)]].label
        self._keep(label, (intended_s, now, now), Answer(Status.NOT_SENT, error=why))

    def take(self, most: int) -> list[Record]:
        """The oldest records that were not taken yet, at most so many."""
        taken, self.records = self.records[:most], self.records[most:]
        return taken

    def _keep(self, label: str, moments: tuple[float, float, float], answer: Answer) -> None:
        stages = answer.stages or _NO_STAGES
        self.count += 1
        self.records.append(
            Record(
                round=self.round,
                phase=self.phase,
                side=self.side,
                request=label,
                intended_s=moments[0] - self.epoch_s,
                sent_s=moments[1] - self.epoch_s,
                done_s=moments[2] - self.epoch_s,
                status=answer.status,
                code=answer.code,
                error=answer.error,
                sent_bytes=answer.sent_bytes,
                received_bytes=answer.received_bytes,
                batch_size=answer.batch_size,
                decode_ms=stages.decode_ms,
                preprocess_ms=stages.preprocess_ms,
                queue_ms=stages.queue_ms,
                infer_ms=stages.infer_ms,
                postprocess_ms=stages.postprocess_ms,
                total_ms=stages.total_ms,
            )
        )


@asynccontextmanager
async def answered_in_time(asking: Asking) -> AsyncIterator[asyncio.Timeout]:
    """A limit to set for the requests under way. Raises DriverError where it passes: a client forgot its deadline."""
    limit = asyncio.timeout(None)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise DriverError(
            f"requests of {', '.join(lane.label for lane in asking.lanes)} were still under way "
            f"in phase {asking.phase!r} after their deadline"
        ) from None


_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1  # linux/time.h, linux/timerfd.h
_NANOSECONDS = 1_000_000_000


class Alarm(Protocol):
    """Rings once for each set; a later set replaces an earlier one."""

    def set(self, at_s: float) -> None:
        """Rings at that moment, or as soon as the loop turns where it is past."""
        ...

    def close(self) -> None:
        """Does not ring any more."""
        ...


MakeAlarm = Callable[[Callable[[], None]], Alarm]


def make_alarm(on_ring: Callable[[], None]) -> Alarm:
    """The most precise alarm that this platform has, on the running loop."""
    return TimerfdAlarm(on_ring) if sys.platform == "linux" else LoopAlarm(on_ring)


class _Itimerspec(ctypes.Structure):
    """struct itimerspec: the interval (none), then the moment; each as seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerfdAlarm:
    """By Linux's timerfd. Owns a file; close() it. Raises OSError where the kernel has none."""

    def __init__(self, on_ring: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = _checked(self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop = asyncio.get_running_loop()
        self._on_ring = on_ring
        self._moment = _Itimerspec()
        self._loop.add_reader(self._file, self._ring)

    def set(self, at_s: float) -> None:
        """Rings at that moment."""
        moment_ns = max(1, math.ceil(at_s * _NANOSECONDS))  # 0 would disarm it
        self._moment.value_s, self._moment.value_ns = divmod(moment_ns, _NANOSECONDS)
        _checked(self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(self._moment), None))

    def close(self) -> None:
        """Gives the file back."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _ring(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # set anew since the loop saw that it was due
            return
        self._on_ring()


class LoopAlarm:
    """By the loop's own timers, where there is no timerfd; as precise as the loop is. The loop's clock is taken for
    the monotonic clock, as it is in asyncio."""

    def __init__(self, on_ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_ring = on_ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        """Rings at that moment."""
        self.close()
        self._handle = self._loop.call_at(at_s, self._on_ring)

    def close(self) -> None:
        """Takes the timer back."""
        if self._handle:
            self._handle.cancel()
            self._handle = None


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, f"timerfd: {os.strerror(number)}")
    return result


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
