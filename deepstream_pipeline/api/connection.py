"""uvicorn's HTTP/1.1 connection with deadlines and bounds for the client, which it lacks.

A head or a body that dribbles, a reader that does not read, a head without end: each ends its own connection.
"""

import asyncio
import json
import logging
import ssl
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deepstream_pipeline.api.audit import CERTIFICATE

MAX_HEAD_BYTES = 64 * 1024
LEAST_CHUNK_BYTES = 32  # average of the chunks in a read, not counting the first 2,048
_MAX_CHUNK_DEBT_BYTES = 64 * 1024
_quiet = logging.getLogger("penstock.video.api")  # clients' faults are answered, not logged
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


class BoundedConnection(HttpToolsProtocol):
    """One client's connection. client_timeout_s: for a head, a body, and for what was written to be read."""

    def __init__(self, *, client_timeout_s: float, max_connections: int, **given: Any) -> None:
        super().__init__(**given)
        self.logger = _quiet
        self._timeout_s, self._max_connections = client_timeout_s, max_connections
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._head_bytes = 0
        self._is_further_chunk = False
        self._chunk_debt_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse("503 Service Unavailable", f"{self._max_connections} connections are open, the limit")
            return
        self._await_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._request_timer)
        self._stop(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._is_further_chunk = False
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse("431 Request Header Fields Too Large", f"a head has at most {MAX_HEAD_BYTES} bytes")
        elif self._request_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_client()  # empty lines before a head, which begin no message

    def on_message_begin(self) -> None:
        super().on_message_begin()
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        if tls is not None and (certificate := tls.getpeercert(binary_form=True)):
            cast(dict[str, Any], self.scope)[CERTIFICATE] = certificate
        self._is_in_head, self._head_bytes = True, 0
        self._await_client()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._chunk_debt_bytes = False, 0
        super().on_headers_complete()
        self._await_client()

    def on_body(self, body: bytes) -> None:
        """Called for each chunk; refuses a body of tiny ones."""
        if self._is_further_chunk:
            self._chunk_debt_bytes = max(0, self._chunk_debt_bytes + LEAST_CHUNK_BYTES - len(body))
            if self._chunk_debt_bytes > _MAX_CHUNK_DEBT_BYTES:
                raise ValueError("the body's chunks are too small")  # ends the parser with 400
        self._is_further_chunk = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop(self._request_timer)
        self._request_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", "the request is not valid HTTP/1.1")

    def _await_client(self) -> None:
        self._stop(self._request_timer)
        self._request_timer = self.loop.call_later(self._timeout_s, self._too_slow)

    def _too_slow(self) -> None:
        if self._is_in_head:
            self.transport.abort()
            return
        self._refuse("408 Request Timeout", f"the request did not arrive within {self._timeout_s:g} s")

    def _refuse(self, status: str, text: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps({"error": text}).encode()
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._stop(self._write_timer)
        self._write_timer = self.loop.call_later(1.0, self.transport.abort)  # who does not read that is cut

    def _stop(self, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
