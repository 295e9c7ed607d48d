"""The request that a connection serves: its state, its disconnect, and its answer in one write."""

from collections.abc import Callable, Iterable, Sequence

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

ANSWER_IS_COUNTED = "penstock.answer_is_counted"  # of a scope whose app counts the answer itself
SERVED_REQUEST = "penstock.served_request"  # of a scope: its ServedRequest
_BODILESS = (204, 304)


class ServedRequest:
    """State of the request that a connection serves. The connection puts this object into the request's scope.

    ASGI reports a disconnect only to a task that awaits `receive`. One more task for each request took 4 to 5 % of the
    samples in a profile of relayed requests.
    """

    __slots__ = ("_cycle", "_head", "_leave")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._head: Message | None = None
        self._leave: Callable[[], None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether something of the answer was sent."""
        return self._cycle.response_started

    @property
    def has_whole_body(self) -> bool:
        """Whether all of the body has arrived, though it may not have been read."""
        return not self._cycle.more_body

    @property
    def is_answer_counted(self) -> bool:
        """Whether its app counts its answer."""
        return ANSWER_IS_COUNTED in self._cycle.scope

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has left."""
        return self._cycle.disconnected

    def watch(self, leave: Callable[[], None]) -> None:
        """Calls `leave` when the client disconnects. Goes on reading the connection, to notice that."""
        self._cycle.flow.resume_reading()
        self._leave = leave

    def unwatch(self) -> None:
        """Stops calling `leave`."""
        self._leave = None

    def disconnect(self) -> None:
        """Marks the client as disconnected: wakes `receive` and calls `leave`. Does nothing after a complete answer."""
        if self._cycle.response_complete:
            return
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        if self._leave is not None:
            self._leave()

    async def send(self, message: Message) -> None:
        """ASGI's `send`. A head that declares a length waits for its body: uvloop writes each piece at once.

        Raises RuntimeError for a header with a line break.
        """
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._head = None
            if self._may_wait(message):
                self._head = message
            else:
                await cycle.send(message)  # type: ignore[arg-type]  # uvicorn has its own types of the same messages
            return
        head, self._head = self._head, None
        if head is not None:
            if not message.get("more_body", False) and _length_of(head) == len(message.get("body", b"")):
                if not cycle.disconnected:
                    self._write(head["status"], head["headers"], message.get("body", b""))
                return
            await cycle.send(head)  # type: ignore[arg-type]
        await cycle.send(message)  # type: ignore[arg-type]

    def _may_wait(self, head: Message) -> bool:
        cycle = self._cycle
        is_usual = not cycle.response_started and not cycle.access_log and cycle.scope["method"] != "HEAD"
        return is_usual and not cycle.flow.write_paused and head["status"] not in _BODILESS and _length_of(head) >= 0

    def _write(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        cycle = self._cycle
        every = [*cycle.default_headers, *headers]
        closes = any(name == b"connection" and b"close" in value for name, value in every)
        if not cycle.keep_alive and not closes:
            every.append((b"connection", b"close"))
        lines = [b"%s: %s\r\n" % header for header in every]
        head = b"".join((STATUS_LINE[status], *lines, b"\r\n"))
        if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2:
            raise RuntimeError("a header of the answer has a line break")
        cycle.keep_alive = cycle.keep_alive and not closes
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.writelines((head, body) if body else (head,))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


def _length_of(head: Message) -> int:
    """The declared length in bytes; -1 without one."""
    headers: Sequence[tuple[bytes, bytes]] = head.get("headers", ())
    return next((int(value) for name, value in headers if name == b"content-length"), -1)
