"""An open loop by schedule, and the processes that generate load."""

import itertools
import os
import select
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Self, TypeVar

from loadtest.bench.gpu.callers import (
    OK,
    BrokenConnection,
    CallerLane,
    CallersRun,
    Connection,
    Reply,
    reply_text,
    run_callers,
)

_IDLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Schedule:
    """port: whom it asks. requests: in turn. moments_s: when, from the begin. connections: at most so many at once.

    sample_every: the body of each so many-th good answer is kept; 0 for none.
    """

    port: int
    requests: tuple[bytes, ...]
    moments_s: tuple[float, ...]
    connections: int
    timeout_s: float = 5.0
    sample_every: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """latencies_ms: of good answers, from the intended moment. late_ms: from that to the sending of each request.

    failures: (what was said, how often). unsent: that no connection was free for in time, or no answer came to.
    samples: bodies of some good answers.
    """

    latencies_ms: list[float]
    late_ms: list[float]
    failures: dict[str, int]
    unsent: int
    cpu_s: float
    samples: tuple[bytes, ...] = ()


class _OpenLoop:
    """One process's share of a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._epoll = select.epoll()
        self._free: deque[Connection] = deque()
        self._by_fd: dict[int, Connection] = {}
        self._intended_s: dict[int, float] = {}
        self._waiting: deque[float] = deque()
        self._count = 0
        self.latencies_ms: list[float] = []
        self.late_ms: list[float] = []
        self.failures: Counter[str] = Counter()
        self.samples: list[bytes] = []

    def open_all(self) -> None:
        """Raises OSError."""
        for _ in range(self._schedule.connections):
            self._open()

    def run(self, begin_s: float) -> None:
        """Sends everything, then waits for answers for the schedule's time-out."""
        due = deque(begin_s + moment_s for moment_s in self._schedule.moments_s)
        until_s = (due[-1] if due else begin_s) + self._schedule.timeout_s
        while (now := time.monotonic()) < until_s and (due or self._waiting or self._intended_s):
            while due and due[0] <= now:
                self._waiting.append(due.popleft())
            while self._waiting and self._free:
                self._send(self._waiting.popleft())
            self._wait(min(_IDLE_S, max(0.0, (due[0] if due else until_s) - time.monotonic())))

    @property
    def unanswered(self) -> int:
        """Sent or not."""
        return len(self._waiting) + len(self._intended_s)

    def close(self) -> None:
        """Closes every connection."""
        for connection in self._by_fd.values():
            connection.close()
        self._epoll.close()

    def _open(self) -> None:
        connection = Connection(self._schedule.port)
        self._by_fd[connection.fileno()] = connection
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._free.append(connection)

    def _send(self, intended_s: float) -> None:
        connection, requests = self._free.popleft(), self._schedule.requests
        request = requests[self._count % len(requests)]
        self._count += 1
        self._intended_s[connection.fileno()] = intended_s
        self.late_ms.append((time.monotonic() - intended_s) * 1000)
        try:
            if not connection.send(request):
                self._epoll.modify(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except BrokenConnection as broken:
            self._fail(connection, str(broken))

    def _wait(self, timeout_s: float) -> None:
        """epoll counts in milliseconds; select, to which it is one file, wakes within some tens of microseconds."""
        if not select.select((self._epoll,), (), (), timeout_s)[0]:
            return
        for fd, event in self._epoll.poll(0):
            connection = self._by_fd[fd]
            try:
                if event & select.EPOLLOUT and connection.send_rest():
                    self._epoll.modify(fd, select.EPOLLIN)
                if event & ~select.EPOLLOUT and (reply := connection.receive()):
                    self._answered(connection, reply)
            except BrokenConnection as broken:
                self._fail(connection, str(broken))

    def _answered(self, connection: Connection, reply: Reply) -> None:
        intended_s = self._intended_s.pop(connection.fileno())
        self._free.append(connection)
        if reply.status != OK:
            self.failures["503" if reply.status == 503 else reply_text(reply)] += 1
            return
        self.latencies_ms.append((time.monotonic() - intended_s) * 1000)
        every = self._schedule.sample_every
        if every and len(self.latencies_ms) % every == 0:
            self.samples.append(reply.body)

    def _fail(self, connection: Connection, why: str) -> None:
        """A connection that was closed while it was idle is opened anew, and is no failure."""
        fd = connection.fileno()
        if self._intended_s.pop(fd, None) is not None:
            self.failures[why] += 1
        else:
            self._free.remove(connection)
        del self._by_fd[fd]
        connection.close()
        try:
            self._open()
        except OSError as error:
            self.failures[f"no connection: {error.strerror}"] += 1


def run_schedule(schedule: Schedule, begin_s: float) -> ScheduleRun:
    """The schedule, its begin on the monotonic clock. Raises OSError if the port is closed."""
    loop = _OpenLoop(schedule)
    try:
        loop.open_all()
        time.sleep(max(0.0, begin_s - time.monotonic()))
        before_s = time.process_time()
        loop.run(begin_s)
        cpu_s = time.process_time() - before_s
        samples = tuple(loop.samples)
        return ScheduleRun(loop.latencies_ms, loop.late_ms, dict(loop.failures), loop.unanswered, cpu_s, samples)
    finally:
        loop.close()


START_S = 0.15  # from the plan to the first request: every process has its connections by then
_NICENESS = -10
T = TypeVar("T")


class Generators:
    """Some processes, each with its share of a run."""

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin)

    def __enter__(self) -> Self:
        list(self._pool.map(_nothing, range(self._count)))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def closed(self, lanes: Sequence[CallerLane], *, settle_s: float, seconds: float) -> Callable[[], CallersRun]:
        """Begins a run; the result waits for its end. Lanes keep their numbers."""
        begin_s = time.monotonic() + START_S
        numbered = list(enumerate(lanes))
        parts = [part for number in range(self._count) if (part := numbered[number :: self._count])]
        running = [self._pool.submit(run_callers, part, begin_s, settle_s, seconds) for part in parts]
        return lambda: _one_of_callers(_results(running))

    def opened(self, schedule: Schedule) -> Callable[[], ScheduleRun]:
        """Begins a schedule, its moments dealt out; what is returned waits for it."""
        begin_s = time.monotonic() + START_S
        parts = [_part(schedule, number, self._count) for number in range(self._count)]
        running = [self._pool.submit(run_schedule, part, begin_s) for part in parts]
        return lambda: _one_of_schedules(_results(running))


def _results(running: Sequence["Future[T]"]) -> list[T]:
    return [future.result() for future in running]


def _part(schedule: Schedule, number: int, count: int) -> Schedule:
    moments = schedule.moments_s[number::count]
    connections = max(1, schedule.connections // count)
    return replace(schedule, moments_s=moments, connections=connections)


def _one_of_callers(runs: Sequence[CallersRun]) -> CallersRun:
    asks = [ask for run in runs for ask in run.asks]
    return CallersRun(asks, max(run.seconds for run in runs), sum(run.cpu_s for run in runs))


def _one_of_schedules(runs: Sequence[ScheduleRun]) -> ScheduleRun:
    failures: Counter[str] = Counter()
    for run in runs:
        failures.update(run.failures)
    return ScheduleRun(
        list(itertools.chain.from_iterable(run.latencies_ms for run in runs)),
        list(itertools.chain.from_iterable(run.late_ms for run in runs)),
        dict(failures),
        sum(run.unsent for run in runs),
        sum(run.cpu_s for run in runs),
        tuple(itertools.chain.from_iterable(run.samples for run in runs)),
    )


def _nothing(number: int) -> int:
    return number


def _begin() -> None:
    """Before others, where this user may say so: a generator that waits for a core measures itself. Ctrl-C, which the
    terminal sends to all, is the bench's own matter.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
