"""uvicorn's HTTP/1.1 connection with limits on heads, chunk framing, pipelines, and on slow clients.

uvicorn times only idle connections, bounds no head, and writes a response of its own into the middle of another.
"""

import asyncio
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.gateway.rest.limits import ConnectionLimits, ConnectionPhase, ConnectionTimeouts, TimeoutAction
from penstock.gateway.rest.responses import CHUNK_FRAMING, MALFORMED, ClosingResponse, malformed
from penstock.gateway.rest.routes import CLIENT_CERTIFICATE
from penstock.gateway.rest.served_request import SERVED_REQUEST, ServedRequest
from penstock.network import tcp_info
from penstock.port_policy import host_fault
from penstock.tls import subject_of

LINGERING_CONNECTIONS = 64
WIRE_BYTES_A_BODY_BYTE = 16
LEAST_CHUNK_BYTES = 32  # average of the chunks in a read: each chunk costs as much CPU as this many bytes
_COUNT = struct.Struct("=Q")
_ACKNOWLEDGED_AT = 120  # tcpi_bytes_acked of Linux's struct tcp_info
_INFO_BYTES = _ACKNOWLEDGED_AT + _COUNT.size
_CLOSED_BY_CLIENT = (7, 8)  # TCP_CLOSE after a reset, TCP_CLOSE_WAIT; tcpi_state is the first byte


class UnreadAnswers(Protocol):
    """Counts bytes of answers that wait in this process for their readers."""

    def hold(self, size_bytes: int) -> None:
        """So many bytes more wait."""

    def release(self, size_bytes: int) -> None:
        """So many bytes, held before, wait no more."""


@dataclass(frozen=True, slots=True)
class ListenerState:
    """Shared by all connections of a listener.

    refused: called with a stable reason for each refused or closed connection. by_address: number of open connections
    by client address. turned_away: open connections that only wait for their end. is_elsewhere: whether another
    process got a new connection, by its descriptor and the number of open ones.
    """

    limits: ConnectionLimits
    unread: UnreadAnswers
    refused: Callable[[str], None]
    by_address: Counter[str] = field(default_factory=Counter)
    turned_away: set[object] = field(default_factory=set)
    is_elsewhere: Callable[[int, int], bool] | None = None


def _client_certificate(transport: asyncio.BaseTransport) -> str:
    """The subject of the client's verified certificate; "" for none."""
    connection = transport.get_extra_info("ssl_object")
    certificate = connection.getpeercert(binary_form=True) if connection is not None else None
    return subject_of(certificate) if certificate else ""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One client's connection. `sweep` it at intervals: what is too slow ends there."""

    def __init__(self, guard: ListenerState, **given: Any) -> None:
        super().__init__(**given)
        self._guard = guard
        self._timeouts = ConnectionTimeouts(guard.limits)
        self._certificate = ""
        self._turn = 0
        self._address = ""
        self._served: ServedRequest | None = None
        self._is_in_head = False
        self._is_in_body = False
        self._head_bytes = 0  # of the head, before the bytes that are being parsed
        self._fed_bytes = 0  # that are being parsed
        self._body_bytes = 0  # of a body, among them
        self._framing_debt = self._chunk_debt = 0
        self._unread_bytes = 0
        self._refusal: ClosingResponse | None = None
        self._is_refused = False
        self._is_replaying = False
        self._is_elsewhere = False

    def sweep(self, now: float) -> None:
        """Closes the connection if it exceeds a time limit or its client has disconnected. now: monotonic seconds."""
        if self.flow.read_paused and self._has_client_left():
            self.transport.abort()
            return
        verdict = self._timeouts.look(now, self._phase, turn=self._turn)
        reader = self._timeouts.look_at_reader(now, self._acknowledged_bytes())
        if reader is TimeoutAction.ABORT:
            self._guard.refused("slow_reader")
            self.transport.abort()
        elif verdict is TimeoutAction.CLOSE:
            self.transport.close()
        elif verdict is TimeoutAction.ABORT:
            self.transport.abort()
        elif verdict is TimeoutAction.HEAD_TOO_SLOW:
            limit_s = self._guard.limits.head_timeout_s
            text = f"the request's head did not arrive within {limit_s:g} s; send it faster"
            self._refuse(ClosingResponse(HTTPStatus.REQUEST_TIMEOUT, "head_too_slow", text))

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        is_elsewhere = self._guard.is_elsewhere
        if is_elsewhere and is_elsewhere(transport.get_extra_info("socket").fileno(), len(self.connections)):
            self._is_elsewhere = True
            transport.abort()  # nothing has been read; the other process has the connection still
            return
        super().connection_made(transport)
        self._certificate = _client_certificate(transport)
        limits, by_address = self._guard.limits, self._guard.by_address
        self._address = self.client[0] if self.client else ""
        by_address[self._address] += 1
        turned_away = self._guard.turned_away
        total, from_address = len(self.connections) - len(turned_away), by_address[self._address]
        limit, limit_of_address = limits.max_connections, limits.allowed_from(self._address)
        if total <= limit and from_address <= limit_of_address:
            return
        turned_away.add(self)
        if len(turned_away) > LINGERING_CONNECTIONS:
            self._guard.refused("connections_full")
            self._is_refused = True
            transport.abort()
            return
        text = f"{limit} connections are open, the limit; use one for several requests, or retry after 1 s"
        if from_address > limit_of_address:
            text = (
                f"{limit_of_address} connections from {self._address} are open, the limit per address; use one for "
                "several requests, or name a proxy with --trusted-proxy"
            )
        self._refuse(ClosingResponse(HTTPStatus.SERVICE_UNAVAILABLE, "connections_full", text))

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the newest request alone that its client is gone: of a pipeline, one that has not begun."""
        if self._is_elsewhere:
            return
        self.pipeline.clear()
        self._guard.turned_away.discard(self)
        self._guard.by_address[self._address] -= 1
        if not self._guard.by_address[self._address]:
            del self._guard.by_address[self._address]
        if self._served is not None:
            self._served.disconnect()
        super().connection_lost(exc)  # it calls resume_writing no more: the bytes below are given back here
        self._release_unread()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self._is_refused:
            return
        self._fed_bytes, self._body_bytes = len(data), 0
        was_in_body = self._is_in_body
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or MALFORMED)
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._guard.limits.max_head_bytes:
                self._refuse(self._head_too_large())
        elif was_in_body and self._is_in_body:
            self._weigh_framing(len(data))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._release_unread()
        if self._served is not None and self._served.is_answer_counted:
            return
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._guard.unread.hold(self._unread_bytes)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._release_unread()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._is_replaying:
            return
        limit = self._guard.limits.max_pipelined
        if len(self.pipeline) >= limit:
            text = f"{limit} requests wait on this connection, the limit; read answers before sending more"
            self._fail(ClosingResponse(HTTPStatus.SERVICE_UNAVAILABLE, "pipeline_full", text))
        self._turn += 1
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()
        if self._certificate:
            cast(dict[str, Any], self.scope)[CLIENT_CERTIFICATE] = self._certificate

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # a trailer, which must not become a header of the request
            self._charge_chunk(0)
            return
        if len(self.headers) >= self._guard.limits.max_headers:
            self._fail(self._head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_replaying:
            self._is_replaying = False
            return
        limits = self._guard.limits
        if self._head_bytes + self._fed_bytes > limits.max_head_bytes and self._parsed_bytes() > limits.max_head_bytes:
            self._fail(self._head_too_large())
        if fault := host_fault(self.url, self.parser.get_http_version(), self.headers):
            self._fail(malformed(fault))
        self._is_in_head, self._is_in_body = False, True
        self._framing_debt = self._chunk_debt = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._body_bytes:  # not the first chunk of the read
            self._charge_chunk(len(body))
        self._body_bytes += len(body)
        cycle = self.cycle
        if cycle is not None and not (cycle.body or cycle.response_complete or self.parser.should_upgrade()):
            # The first piece, usually the whole body, is neither copied, nor does it pause reading: the next may do.
            cycle.body = body  # type: ignore[assignment]
            cycle.message_event.set()
            return
        if cycle is not None and isinstance(cycle.body, bytes):
            cycle.body = bytearray(cycle.body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # _feed sees to its body
        self._is_in_body = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = ServedRequest(cycle)
        cast(dict[str, Any], cycle.scope)[SERVED_REQUEST] = self._served
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """The next request's turn; idle connections are closed by the sweep."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._answer(self._refusal)

    def _feed(self, data: bytes) -> None:
        """To the parser. An offer to upgrade is declined, by serving the request as HTTP/1.1.

        The parser stops at such an offer and takes the request's body for another protocol, so a new one goes on, that
        has seen how the body is framed and nothing of an upgrade.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._is_replaying = True
                self.parser.feed_data(_framing_head(self.headers))

    # what is refused

    @property
    def _phase(self) -> ConnectionPhase:
        if self._is_refused:
            return ConnectionPhase.REFUSED
        if _is_running(self.cycle):
            return ConnectionPhase.BUSY
        return ConnectionPhase.HEAD if self._is_in_head else ConnectionPhase.IDLE

    def _fail(self, refusal: ClosingResponse) -> None:
        """Stop the parser, from inside one of its callbacks."""
        self._refusal = refusal
        raise ValueError(refusal.text)

    def _refuse(self, refusal: ClosingResponse) -> None:
        """Answer, and read no more. Requests that were complete before have their answers first."""
        self._refusal = refusal
        self._guard.refused(refusal.reason)
        if not self._is_in_body:
            if not _is_running(self.cycle):
                self._answer(refusal)
        elif self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        elif self._served is not None and _is_running(self.cycle):
            self._end_broken(self._served, refusal)
        else:
            self._answer(refusal)

    def _end_broken(self, served: ServedRequest, refusal: ClosingResponse) -> None:
        """A request that runs while its body turns out to be broken: its app sees the client go."""
        if served.has_begun:
            self.transport.abort()
            return
        self._answer(refusal)
        served.disconnect()

    def _answer(self, refusal: ClosingResponse) -> None:
        """The connection's last answer. It lingers for the client to read it; what still comes is thrown away."""
        self._is_refused = True
        if self.transport.is_closing():
            return
        self.transport.write(refusal.as_bytes())
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _head_too_large(self) -> ClosingResponse:
        limits = self._guard.limits
        text = (
            f"the request's head has more than {limits.max_head_bytes} bytes or {limits.max_headers} headers, "
            "the limits; send less"
        )
        return ClosingResponse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", text)

    def _parsed_bytes(self) -> int:
        return len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])

    def _weigh_framing(self, wire_bytes: int) -> None:
        """Chunk extensions and trailers are no body, and may not go on for ever in its place."""
        self._framing_debt = max(0, self._framing_debt + wire_bytes - WIRE_BYTES_A_BODY_BYTE * self._body_bytes)
        if self._framing_debt > self._guard.limits.max_head_bytes:
            self._refuse(CHUNK_FRAMING)

    def _charge_chunk(self, size_bytes: int) -> None:
        """A read of 256 KiB can have 43,000 chunks of a byte: each is a callback, and other clients wait meanwhile."""
        self._chunk_debt = max(0, self._chunk_debt + LEAST_CHUNK_BYTES - size_bytes)
        if self._chunk_debt > self._guard.limits.max_head_bytes:
            self._fail(CHUNK_FRAMING)

    def _release_unread(self) -> None:
        if self._unread_bytes:
            self._guard.unread.release(self._unread_bytes)
            self._unread_bytes = 0

    def _acknowledged_bytes(self) -> int | None:
        """What the client has taken so far, None while nothing waits here for it."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes:
            return None
        info = tcp_info(self.transport.get_extra_info("socket"), _INFO_BYTES)
        if info is None:
            return -unsent_bytes  # it rises as the client reads
        found: tuple[int] = _COUNT.unpack_from(info, _ACKNOWLEDGED_AT)
        return found[0]

    def _has_client_left(self) -> bool:
        """Whether the client closed or reset the connection. asyncio does not see it while reading is paused."""
        info = tcp_info(self.transport.get_extra_info("socket"), _INFO_BYTES)
        return info is not None and info[0] in _CLOSED_BY_CLIENT


def _framing_head(headers: list[tuple[bytes, bytes]]) -> bytes:
    """A head that says of the body what these headers say, and nothing else."""
    framing = [b"%s: %s" % header for header in headers if header[0] in (b"content-length", b"transfer-encoding")]
    return b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", b""])


def _is_running(cycle: RequestResponseCycle | None) -> bool:
    return cycle is not None and not cycle.response_complete
