"""One keep-alive HTTP/1.1 connection to the engine. Does not modify bytes.

aiohttp needs 2.6 to 3.9 times the CPU (`python -m loadtest.bench.gateway.engine_clients --only http`), and normalises
headers.
"""

import asyncio
import re
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from penstock.protocol.call import CONNECTION_HEADERS, HOP_BY_HOP, HttpAnswer, HttpCall, HttpHeaders, end_to_end
from penstock.protocol.cancellation import MAX_ABANDONED_S, AbandonedCall, mark_abandoned
from penstock.protocol.errors import EngineFailed, InvalidRequest
from penstock.protocol.http_body import BodyBuffer

IDLE_S, PROBE_INTERVAL_S, PROBES = 10, 5, 2
UNACKNOWLEDGED_MS = 15_000


def detect_dead_peers(transport: asyncio.Transport) -> None:
    """Sets TCP keepalive: a vanished peer is noticed within 20 s, also with unacknowledged bytes."""
    connected = transport.get_extra_info("socket")
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", PROBE_INTERVAL_S),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


HIGH_BYTES = 256 << 10
LOW_BYTES = 64 << 10


class BodyStream:
    """Pieces of a body, in order. throttle: called with True above HIGH_BYTES unread, with False at LOW_BYTES."""

    def __init__(self, throttle: Callable[[bool], None]) -> None:
        self._throttle = throttle
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_throttled = False
        self._has_ended = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, piece: bytes) -> None:
        """Appends a piece."""
        self._pieces.append(piece)
        self._waiting_bytes += len(piece)
        self._changed.set()
        if self._waiting_bytes > HIGH_BYTES:
            self._set_throttled(True)

    def end(self, error: Exception | None = None) -> None:
        """Ends the body. error: why it is incomplete. Later calls are ignored."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._changed.set()

    async def take(self) -> bytes:
        """Waits for the next piece; empty at the end. After all pieces, raises the error given to `end`."""
        while not self._pieces and not self._has_ended:
            self._changed.clear()
            await self._changed.wait()
        if not self._pieces:
            if self._error is not None:
                raise self._error
            return b""
        piece = self._pieces.popleft()
        self._waiting_bytes -= len(piece)
        if self._waiting_bytes <= LOW_BYTES:
            self._set_throttled(False)
        return piece

    def _set_throttled(self, is_throttled: bool) -> None:
        if is_throttled is not self._is_throttled:
            self._is_throttled = is_throttled
            self._throttle(is_throttled)


JOIN_LIMIT_BYTES = 64 << 10
MAX_FIELD_BYTES = 8_189  # maximum for a target, a header's name or its value in Triton 2.51

_BODILESS = ("GET", "HEAD", "DELETE", "OPTIONS")
_TARGET = re.compile(rb"/[^\x00-\x20\x7f]*")
_STATUS_OK = b"HTTP/1.1 200"
_METHOD = re.compile(r"[A-Z]+")


class ConnectionBroken(Exception):
    """The connection ended before the answer. has_begun: a byte of the answer was received."""

    def __init__(self, why: str, *, has_begun: bool) -> None:
        super().__init__(why)
        self.has_begun = has_begun


def request_head(call: HttpCall, host: bytes, base_path: bytes = b"") -> bytes:
    """The client's request line and headers, without those of its connection. Raises InvalidRequest."""
    if not _TARGET.fullmatch(call.target) or not _METHOD.fullmatch(call.method):
        raise InvalidRequest(f"malformed request line: {call.method} {call.target!r}")
    lines = [b"%s %s%s HTTP/1.1" % (call.method.encode(), base_path, call.target), b"host: " + host]
    lines += [b"%s: %s" % header for header in end_to_end(call.headers, CONNECTION_HEADERS)]
    if call.body or call.method not in _BODILESS:
        lines.append(b"content-length: %d" % len(call.body))
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
        raise InvalidRequest("a header holds a line break")
    if len(head) > MAX_FIELD_BYTES:
        _check_field_lengths(base_path + call.target, call.headers)
    return head + b"\r\n\r\n"


def _check_field_lengths(target: bytes, headers: HttpHeaders) -> None:
    fields = [("path", target)]
    for name, value in headers:
        fields += [("header's name", name), (f"header {name[:80].decode('latin-1')}", value)]
    for what, field in fields:
        if len(field) > MAX_FIELD_BYTES:
            text = f"the {what} has {len(field)} bytes (limit {MAX_FIELD_BYTES} of the engine's HTTP port); send less"
            raise InvalidRequest(text)


class HttpConnection(asyncio.Protocol):
    """One exchange at a time. `is_open` becomes false when the peer closes the connection, even if idle."""

    def __init__(self) -> None:
        self.is_open = False
        self._abandoned: AbandonedCall | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._inflow: BodyStream | None = None
        self._is_head = False
        self._has_begun = False
        self._is_flowing = False
        self._is_complete = False
        self._ends_at_close = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = BodyBuffer()

    async def exchange(
        self, head: bytes, body: bytes, *, is_head: bool = False, is_finished: bool = False
    ) -> HttpAnswer:
        """The engine's answer, header names in lower case. Raises ConnectionBroken, EngineFailed.

        Cancellation closes the connection, except for calls that the engine completes (is_finished): the error then has
        the abandoned call.
        """
        self._is_head, self._has_begun, self._is_flowing, self._is_complete = is_head, False, False, False
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._send(head, body)
            return await self._answer
        except BaseException as error:  # also if the answer is there: it is discarded
            if is_finished and self._has_all():
                self._abandoned = mark_abandoned(error)
                asyncio.get_running_loop().call_later(MAX_ABANDONED_S, self.close)
            else:
                self.close()
            raise
        finally:
            self._answer = None
            if not self._is_complete and not self._is_flowing and self._abandoned is None:
                self.close()

    async def begin(self, head: bytes, body: bytes) -> tuple[HttpAnswer, BodyStream]:
        """The answer's header, and its body as a stream. Call `finish` afterwards. Both raise as `exchange`."""
        self._inflow = inflow = BodyStream(self._throttle)
        try:
            return await self.exchange(head, body), inflow
        except BaseException:
            self.finish()
            raise

    def finish(self) -> None:
        """Ends reading. The connection stays open only if the answer was complete."""
        self._inflow = None
        if self._is_complete:
            self._throttle(False)
        else:
            self.close()

    def close(self) -> None:
        """Closes the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _has_all(self) -> bool:
        """Whether the call was written completely, and is not answered."""
        if self._transport is None or not self.is_open or self._is_complete:
            return False
        return not self._transport.get_write_buffer_size()

    def _send(self, head: bytes, body: bytes) -> None:
        if self._transport is None or not self.is_open:
            raise ConnectionBroken("the connection was closed", has_begun=False)
        if len(body) < JOIN_LIMIT_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport only has the same methods
        self.is_open = True
        detect_dead_peers(self._transport)

    def data_received(self, data: bytes) -> None:
        if (self._answer is None or self._answer.done()) and not self._is_flowing:
            if self._abandoned is not None:
                self._abandoned.end(is_served=data.startswith(_STATUS_OK))
            self.close()
            return
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(EngineFailed(f"the engine's HTTP answer cannot be read: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._abandoned is not None:
            self._abandoned.end()
        if self._ends_at_close and error is None:
            self._finish()
        else:
            self._fail(ConnectionBroken(str(error or "closed by the engine"), has_begun=self._has_begun))

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._is_complete:
            self.close()  # a second answer to one request: later answers could not be matched
            return
        self._headers, self._body, self._ends_at_close = [], BodyBuffer(), False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._is_head and status >= 200:
            self._finish()  # a HEAD's length is that of a body which is not sent
            self.close()
            return
        lengths = (b"content-length", b"transfer-encoding")
        self._ends_at_close = status >= 200 and not any(name in lengths for name, _ in self._headers)
        if self._inflow is not None and status >= 200:
            self._is_flowing = True
            self._answer_with(b"")

    def on_body(self, body: bytes) -> None:
        if self._inflow is not None:
            self._inflow.put(body)
        else:
            self._body.add(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        keeps_alive = self._parser.should_keep_alive()
        self._finish()
        if not keeps_alive:
            self.close()

    def _finish(self) -> None:
        self._ends_at_close = False
        if self._inflow is not None and self._is_flowing:
            self._is_flowing, self._is_complete = False, True
            self._inflow.end()
        elif self._answer is not None and not self._answer.done():
            self._answer_with(self._body.take())
            self._is_complete = True

    def _answer_with(self, body: bytes) -> None:
        if self._answer is not None and not self._answer.done():
            headers = end_to_end(tuple(self._headers), HOP_BY_HOP)
            self._answer.set_result(HttpAnswer(self._parser.get_status_code(), headers, body))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        elif self._inflow is not None:
            self._inflow.end(error)
        self.close()

    def _throttle(self, is_throttled: bool) -> None:
        """Pauses or resumes reading: unread data fills the kernel's buffers, and then the engine waits."""
        if self._transport is None or self._transport.is_closing():
            return
        if is_throttled:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
