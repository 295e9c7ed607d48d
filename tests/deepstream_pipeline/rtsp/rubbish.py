"""Servers that answer an RTSP client badly, each in its way, over plain TCP."""

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum

_SDP = (
    "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=rubbish\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\nc=IN IP4 0.0.0.0\r\n"
    "a=rtpmap:96 H264/90000\r\na=fmtp:96 packetization-mode=1\r\na=control:track1\r\n"
)
_LONGEST_S = 120.0


class Rubbish(Enum):
    """silence: takes the connection and says nothing. bytes: random ones, for ever. http: answers a web page. hangup:
    closes at once. endless: a head without an end. teapot: 418 to everything. rtp: opens as it should, and then sends
    random bytes where pictures should be. framing: opens, and then sends lengths that do not hold.
    """

    SILENCE = "silence"
    BYTES = "bytes"
    HTTP = "http"
    HANGUP = "hangup"
    ENDLESS = "endless"
    TEAPOT = "teapot"
    RTP = "rtp"
    FRAMING = "framing"


class RubbishServer:
    """Serves one kind of rubbish on a port of its own. connections: how many came. kind may be changed at any time."""

    def __init__(self, kind: Rubbish, *, seed: int = 1, port: int = 0) -> None:
        self.kind = kind
        self.connections = 0
        self._dice = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.settimeout(0.1)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._accept, name="rubbish", daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"rtsp://127.0.0.1:{self._listener.getsockname()[1]}/rubbish"

    def close(self) -> None:
        """Hang up on everybody."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(10.0)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.connections += 1
            self._threads = [thread for thread in self._threads if thread.is_alive()][:64]
            thread = threading.Thread(target=self._serve, args=(connection,), name="rubbish", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        ways: dict[Rubbish, Callable[[socket.socket], None]] = {
            Rubbish.SILENCE: self._wait,
            Rubbish.BYTES: lambda c: self._send_on(c, lambda: self._dice.randbytes(4096)),
            Rubbish.HTTP: self._page,
            Rubbish.HANGUP: lambda _: None,
            Rubbish.ENDLESS: lambda c: self._send_on(c, lambda: b"X-Header: more\r\n", b"RTSP/1.0 200 OK\r\n"),
            Rubbish.TEAPOT: lambda c: self._converse(c, lambda _: "418 I'm a teapot"),
            Rubbish.RTP: lambda c: self._converse(c, self._garbage),
            Rubbish.FRAMING: lambda c: self._converse(c, self._garbage),
        }
        with connection, contextlib.suppress(OSError):
            connection.settimeout(0.2)
            ways[self.kind](connection)

    def _wait(self, connection: socket.socket) -> None:
        until = time.monotonic() + _LONGEST_S
        while not self._is_over.is_set() and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                if not connection.recv(4096):
                    return

    def _send_on(self, connection: socket.socket, part: Callable[[], bytes], first: bytes = b"") -> None:
        until = time.monotonic() + _LONGEST_S
        connection.sendall(first)
        while not self._is_over.is_set() and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                connection.sendall(part())
            time.sleep(0.02)

    def _page(self, connection: socket.socket) -> None:
        with contextlib.suppress(TimeoutError):
            connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5\r\n\r\n<h1>!")

    def _converse(self, connection: socket.socket, answer: Callable[[str], str]) -> None:
        """RTSP as it should be, but for what `answer` says to a method; after PLAY, bytes."""
        seen, until = b"", time.monotonic() + _LONGEST_S
        while not self._is_over.is_set() and time.monotonic() < until:
            try:
                part = connection.recv(65536)
            except TimeoutError:
                continue
            if not part:
                return
            seen += part
            while b"\r\n\r\n" in seen:
                head, _, seen = seen.partition(b"\r\n\r\n")
                method = head.split(b" ", 1)[0].decode("latin-1")
                number = head.lower().partition(b"cseq:")[2].split(b"\r\n")[0].strip().decode()
                connection.sendall(f"RTSP/1.0 {answer(method)}".replace("CSEQ", number).encode())
                if method == "PLAY":
                    self._send_on(connection, self._packet)

    def _garbage(self, method: str) -> str:
        head = "200 OK\r\nCSeq: CSEQ\r\n"
        if method == "OPTIONS":
            return f"{head}Public: OPTIONS, DESCRIBE, SETUP, PLAY\r\n\r\n"
        if method == "DESCRIBE":
            return f"{head}Content-Type: application/sdp\r\nContent-Length: {len(_SDP)}\r\n\r\n{_SDP}"
        if method == "SETUP":
            return f"{head}Session: 1\r\nTransport: RTP/AVP/TCP;unicast;interleaved=0-1\r\n\r\n"
        return f"{head}Session: 1\r\n\r\n"

    def _packet(self) -> bytes:
        size = self._dice.randrange(1, 1400)
        if self.kind is Rubbish.FRAMING:
            return b"$\x00" + struct.pack(">H", self._dice.randrange(65536)) + self._dice.randbytes(size)
        header = struct.pack(">BBHII", 0x80, 96, self._dice.randrange(65536), self._dice.randrange(2**32), 7)
        payload = header + self._dice.randbytes(size)
        return b"$\x00" + struct.pack(">H", len(payload)) + payload


@contextlib.contextmanager
def rubbish_server(kind: Rubbish, *, port: int = 0) -> Iterator[RubbishServer]:
    """One, until the block ends. port: where another server was, or any."""
    server = RubbishServer(kind, port=port)
    try:
        yield server
    finally:
        server.close()
