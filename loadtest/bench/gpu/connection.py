"""A caller's HTTP/1.1 connection as bytes in and out: about 30 µs of CPU a small request, a tenth of a full client's.

The load generator shares the cores with what it measures, and thousands of answers a second are asked of it.
"""

import select
import socket
import time
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


def said(reply: Reply) -> str:
    """What an answer that is no good one says, short enough for a table."""
    return f"{reply.status}: {reply.body[:160].decode(errors='replace')}"
