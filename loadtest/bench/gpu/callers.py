"""A closed loop of callers over plain sockets and one epoll."""

import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"  # not Triton's inference-header-content-length
_CHUNK_BYTES = 1 << 16
_SEND_BUFFER_BYTES = 1 << 20  # a picture goes in one call
OPEN_TIMEOUT_S = 10.0
OK = 200


@dataclass(frozen=True, slots=True)
class Reply:
    """status: HTTP's. body: whole."""

    status: int
    body: bytes


class BrokenConnection(Exception):
    """The server closed the connection, or said what is no HTTP answer with a length."""


class Connection:
    """One request at a time. After `BrokenConnection` it is of no use: close it and open another."""

    def __init__(self, port: int) -> None:
        """Opens it on loopback. Raises OSError."""
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=OPEN_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.socket.setblocking(False)
        self._unsent: memoryview | None = None
        self._received = b""
        self._whole_bytes = 0

    def fileno(self) -> int:
        """Of the socket."""
        return self.socket.fileno()

    def send(self, request: bytes) -> bool:
        """Whether all of it went; else `send_rest` when the socket is writable again. Raises BrokenConnection."""
        self._unsent = memoryview(request)
        return self.send_rest()

    def send_rest(self) -> bool:
        """Whether nothing is left. Raises BrokenConnection."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return False
            except OSError as error:
                raise BrokenConnection(f"while sending: {error}") from None
            self._unsent = self._unsent[sent:]
        self._unsent = None
        return True

    def receive(self) -> Reply | None:
        """The answer, or None while it is not whole. Raises BrokenConnection."""
        try:
            chunk = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise BrokenConnection(f"while receiving: {error}") from None
        if not chunk:
            raise BrokenConnection("closed by the server")
        self._received += chunk
        if not self._whole_bytes:
            self._whole_bytes = _whole_bytes(self._received)
        if not self._whole_bytes or len(self._received) < self._whole_bytes:
            return None
        answer, self._received, self._whole_bytes = self._received, b"", 0
        head, _, body = answer.partition(_HEAD_END)
        return Reply(int(head[9:12]), body)

    def close(self) -> None:
        """Harmless when called again."""
        self.socket.close()


def _whole_bytes(received: bytes) -> int:
    """How long the answer is, head and all; 0 while its head is not whole. Raises BrokenConnection without a length."""
    end = received.find(_HEAD_END)
    if end < 0:
        return 0
    head = received[:end].lower()
    found = head.find(_LENGTH)
    if not head.startswith(b"http/1.1 ") or found < 0:
        raise BrokenConnection(f"no answer with a length: {received[:80]!r}")
    stop = head.find(b"\r", found + len(_LENGTH))
    return end + len(_HEAD_END) + int(head[found + len(_LENGTH) : stop if stop > 0 else end])


def exchange(port: int, request: bytes, *, timeout_s: float) -> Reply:
    """One request on a connection of its own. Raises BrokenConnection, also after timeout_s; OSError."""
    connection, until_s = Connection(port), time.monotonic() + timeout_s
    try:
        is_sent = connection.send(request)
        while (left_s := until_s - time.monotonic()) > 0:
            select.select((connection,), () if is_sent else (connection,), (), left_s)
            is_sent = is_sent or connection.send_rest()
            if reply := connection.receive():
                return reply
    finally:
        connection.close()
    raise BrokenConnection(f"no answer for {timeout_s:g} s")


def reply_text(reply: Reply) -> str:
    """What an answer that is no good one says, short enough for a table."""
    return f"{reply.status}: {reply.body[:160].decode(errors='replace')}"


REOPEN_S = 0.1
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class CallerLane:
    """One caller. name: of the model it asks. request: the bytes of each of its requests. rows: pictures in one."""

    name: str
    port: int
    request: bytes
    rows: int = 1


@dataclass(frozen=True, slots=True)
class CallerRequest:
    """One answered or failed request. at_s: its end, from the run's begin. failure: empty for a good answer."""

    lane: int
    at_s: float
    latency_ms: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class CallersRun:
    """A stretch of a closed loop, the settling before it left out. cpu_s: that the generator used in it."""

    asks: list[CallerRequest]
    seconds: float
    cpu_s: float


class _Caller:
    """A lane being kept busy: it asks again as soon as it is answered, and opens anew what broke."""

    __slots__ = ("connection", "lane", "number", "reopen_at_s", "sent_s")

    def __init__(self, number: int, lane: CallerLane) -> None:
        self.number = number
        self.lane = lane
        self.connection: Connection | None = None
        self.sent_s = 0.0
        self.reopen_at_s = 0.0


class _ClosedLoop:
    """All lanes of one process."""

    def __init__(self, lanes: Sequence[tuple[int, CallerLane]], begin_s: float) -> None:
        self._callers = [_Caller(number, lane) for number, lane in lanes]
        self._begin_s = begin_s
        self._epoll = select.epoll()
        self._by_fd: dict[int, _Caller] = {}
        self.asks: list[CallerRequest] = []

    def open_all(self) -> None:
        """Connects every lane."""
        for caller in self._callers:
            self._open(caller)

    def begin(self) -> None:
        """The first request of every lane."""
        for caller in self._callers:
            self._ask(caller, time.monotonic())

    def run(self, until_s: float) -> None:
        """Until that moment of the clock; requests under way then are not counted."""
        while (now := time.monotonic()) < until_s:
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
        failure = "" if reply.status == OK else reply_text(reply)
        self.asks.append(CallerRequest(caller.number, now - self._begin_s, (now - caller.sent_s) * 1000, failure))
        if failure:
            caller.sent_s, caller.reopen_at_s = 0.0, now + REOPEN_S  # a server that refuses is not asked in a hot loop
        else:
            self._ask(caller, now)

    def _fail(self, caller: _Caller, why: str) -> None:
        now = time.monotonic()
        if caller.sent_s:
            self.asks.append(CallerRequest(caller.number, now - self._begin_s, (now - caller.sent_s) * 1000, why))
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
                    self.asks.append(
                        CallerRequest(caller.number, now - self._begin_s, 0.0, f"no connection: {error.strerror}")
                    )
                    caller.reopen_at_s = now + REOPEN_S
                    continue
                self._ask(caller, now)


def run_callers(
    lanes: Sequence[tuple[int, CallerLane]], begin_s: float, settle_s: float, seconds: float
) -> CallersRun:  # fmt: skip
    """The lanes' closed loop from begin_s on the monotonic clock; what ends in the settling is left out."""
    loop = _ClosedLoop(lanes, begin_s + settle_s)
    try:
        loop.open_all()
        time.sleep(max(0.0, begin_s - time.monotonic()))
        loop.begin()
        loop.run(begin_s + settle_s)
        loop.asks.clear()
        before_s = time.process_time()
        loop.run(begin_s + settle_s + seconds)
        return CallersRun(loop.asks, seconds, time.process_time() - before_s)
    finally:
        loop.close()
