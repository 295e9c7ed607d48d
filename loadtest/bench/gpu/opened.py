"""Requests at their moments, whatever the answers do: latency runs from the moment at which one was due.

As loadtest.driver's open loop, at a fifth of its CPU a request, which at 10,000 pictures/s is three cores of sixteen.
"""

import select
import time
from collections import Counter, deque
from dataclasses import dataclass

from loadtest.bench.gpu.connection import OK, BrokenConnection, Connection, said

_IDLE_S = 0.05


@dataclass(frozen=True, slots=True)
class Schedule:
    """port: whom it asks. requests: in turn. moments_s: when, from the begin. connections: at most so many at once."""

    port: int
    requests: tuple[bytes, ...]
    moments_s: tuple[float, ...]
    connections: int
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ScheduleLap:
    """latencies_ms: of good answers, from the intended moment. late_ms: from that to the sending of each request.

    failures: (what was said, how often). unsent: that no connection was free for in time, or no answer came to.
    """

    latencies_ms: list[float]
    late_ms: list[float]
    failures: dict[str, int]
    unsent: int
    cpu_s: float


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
                    self._answered(connection, reply.status, "" if reply.status == OK else said(reply))
            except BrokenConnection as broken:
                self._fail(connection, str(broken))

    def _answered(self, connection: Connection, status: int, failure: str) -> None:
        intended_s = self._intended_s.pop(connection.fileno())
        self._free.append(connection)
        if failure:
            self.failures[f"{status}" if status == 503 else failure] += 1
        else:
            self.latencies_ms.append((time.monotonic() - intended_s) * 1000)

    def _fail(self, connection: Connection, why: str) -> None:
        """A connection that was closed while nobody asked is opened anew, and is no failure."""
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


def run_schedule(schedule: Schedule, begin_s: float) -> ScheduleLap:
    """The schedule, its begin on the monotonic clock. Raises OSError where nobody listens."""
    loop = _OpenLoop(schedule)
    try:
        loop.open_all()
        time.sleep(max(0.0, begin_s - time.monotonic()))
        before_s = time.process_time()
        loop.run(begin_s)
        cpu_s = time.process_time() - before_s
        return ScheduleLap(loop.latencies_ms, loop.late_ms, dict(loop.failures), loop.unanswered, cpu_s)
    finally:
        loop.close()
