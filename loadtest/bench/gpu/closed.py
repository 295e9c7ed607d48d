"""Callers in a closed loop over plain sockets and one epoll: each asks again as soon as it is answered."""

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.gpu.connection import OK, BrokenConnection, Connection, Reply, said

REOPEN_S = 0.1
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Lane:
    """One caller. name: of the model it asks. request: the bytes of each of its requests. rows: pictures in one."""

    name: str
    port: int
    request: bytes
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """One answered or failed request. at_s: its end, from the lap's begin. failure: empty for a good answer."""

    lane: int
    at_s: float
    latency_ms: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class CallersLap:
    """A stretch of a closed loop, the settling before it left out. cpu_s: that the generator used in it."""

    asks: list[Ask]
    seconds: float
    cpu_s: float


class _Caller:
    """A lane being kept busy: it asks again as soon as it is answered, and opens anew what broke."""

    __slots__ = ("connection", "lane", "number", "reopen_at_s", "sent_s")

    def __init__(self, number: int, lane: Lane) -> None:
        self.number = number
        self.lane = lane
        self.connection: Connection | None = None
        self.sent_s = 0.0
        self.reopen_at_s = 0.0


class _ClosedLoop:
    """All lanes of one process."""

    def __init__(self, lanes: Sequence[tuple[int, Lane]], begin_s: float) -> None:
        self._callers = [_Caller(number, lane) for number, lane in lanes]
        self._begin_s = begin_s
        self._epoll = select.epoll()
        self._by_fd: dict[int, _Caller] = {}
        self.asks: list[Ask] = []

    def open_all(self) -> None:
        """Connects every lane."""
        for caller in self._callers:
            self._open(caller)

    def begin(self) -> None:
        """The first request of every lane."""
        for caller in self._callers:
            self._ask(caller, time.monotonic())

    def run(self, until_s: float, stop: Path | None = None) -> None:
        """Until that moment of the clock, or until the file is there; what is under way then is not counted."""
        look_at_s = 0.0
        while (now := time.monotonic()) < until_s:
            if stop and now >= look_at_s:
                look_at_s = now + _POLL_S
                if stop.exists():
                    return
            for fd, event in self._epoll.poll(min(_POLL_S, until_s - now)):
                self._turn(self._by_fd[fd], event)
            self._reopen(time.monotonic())

    def close(self) -> None:
        """Closes every connection."""
        for caller in self._callers:
            if caller.connection:
                caller.connection.close()
        self._epoll.close()

    def _open(self, caller: _Caller) -> None:
        caller.connection = Connection(caller.lane.port)
        self._by_fd[caller.connection.fileno()] = caller
        self._epoll.register(caller.connection.fileno(), select.EPOLLIN)

    def _ask(self, caller: _Caller, now: float) -> None:
        if caller.connection is None:
            return
        caller.sent_s = now
        try:
            if not caller.connection.send(caller.lane.request):
                self._epoll.modify(caller.connection.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except BrokenConnection as broken:
            self._fail(caller, str(broken))

    def _turn(self, caller: _Caller, event: int) -> None:
        connection = caller.connection
        assert connection is not None
        try:
            if event & select.EPOLLOUT and connection.send_rest():
                self._epoll.modify(connection.fileno(), select.EPOLLIN)
            if event & ~select.EPOLLOUT and (reply := connection.receive()):
                self._answered(caller, reply)
        except BrokenConnection as broken:
            self._fail(caller, str(broken))

    def _answered(self, caller: _Caller, reply: Reply) -> None:
        now = time.monotonic()
        failure = "" if reply.status == OK else said(reply)
        self.asks.append(Ask(caller.number, now - self._begin_s, (now - caller.sent_s) * 1000, failure))
        if failure:
            caller.sent_s, caller.reopen_at_s = 0.0, now + REOPEN_S  # a server that refuses is not asked in a hot loop
        else:
            self._ask(caller, now)

    def _fail(self, caller: _Caller, why: str) -> None:
        now = time.monotonic()
        if caller.sent_s:
            self.asks.append(Ask(caller.number, now - self._begin_s, (now - caller.sent_s) * 1000, why))
        if caller.connection:
            del self._by_fd[caller.connection.fileno()]
            caller.connection.close()
        caller.connection, caller.sent_s, caller.reopen_at_s = None, 0.0, now + REOPEN_S

    def _reopen(self, now: float) -> None:
        for caller in self._callers:
            if caller.reopen_at_s and now >= caller.reopen_at_s:
                caller.reopen_at_s = 0.0
                try:
                    if caller.connection is None:
                        self._open(caller)
                except OSError as error:
                    self.asks.append(Ask(caller.number, now - self._begin_s, 0.0, f"no connection: {error.strerror}"))
                    caller.reopen_at_s = now + REOPEN_S
                    continue
                self._ask(caller, now)


def run_callers(
    lanes: Sequence[tuple[int, Lane]], begin_s: float, settle_s: float, seconds: float, stop: Path | None = None
) -> CallersLap:
    """The lanes' closed loop from begin_s on the monotonic clock; what ends in the settling is left out.

    stop: a file that ends the lap early when it comes.
    """
    loop = _ClosedLoop(lanes, begin_s + settle_s)
    try:
        loop.open_all()
        time.sleep(max(0.0, begin_s - time.monotonic()))
        loop.begin()
        loop.run(begin_s + settle_s)
        loop.asks.clear()
        before_s = time.process_time()
        loop.run(begin_s + settle_s + seconds, stop)
        return CallersLap(loop.asks, seconds, time.process_time() - before_s)
    finally:
        loop.close()
