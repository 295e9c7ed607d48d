"""A wire between a client and a server that keeps what the server sent, so that headers can be compared."""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hpack import Decoder
from hyperframe.frame import ContinuationFrame, Frame, HeadersFrame

PIECE = 1 << 16
Headers = dict[str, str]


@dataclass
class Tap:
    """Listens on a port of its own and carries every connection on to the server, byte by byte."""

    server: tuple[str, int]
    listener: socket.socket
    received: list[bytearray] = field(default_factory=list)
    clients: list[socket.socket] = field(default_factory=list)

    @property
    def address(self) -> str:
        """host:port for a client."""
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self) -> None:
        """Until `end`, and every connection has ended."""
        with contextlib.ExitStack() as threads:
            while True:
                try:
                    client, _ = self.listener.accept()
                except OSError:
                    return
                kept = bytearray()
                self.received.append(kept)
                self.clients.append(client)
                thread = threading.Thread(target=self._carry, args=(client, kept), daemon=True)
                thread.start()
                threads.callback(thread.join, 5)

    def _carry(self, client: socket.socket, kept: bytearray) -> None:
        """One connection, to its end; a server that is not there ends it at once."""
        with client, contextlib.suppress(OSError), socket.create_connection(self.server) as server:
            open_ways = {client: server, server: client}
            while open_ways:
                readable, _, _ = select.select(list(open_ways), [], [])
                for source in readable:
                    piece = source.recv(PIECE)
                    if source is server:
                        kept += piece
                    if piece:
                        open_ways[source].sendall(piece)
                    else:
                        open_ways.pop(source).shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """No more connections; those that a client left open are cut."""
        for end in (self.listener, *self.clients):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def http_heads(self) -> list[tuple[int, Headers]]:
        """Status and headers of every HTTP/1 answer so far, in the order of the connections."""
        return [head for kept in self.received for head in _http_heads(bytes(kept))]

    def grpc_heads(self) -> list[Headers]:
        """Every block of gRPC headers so far, initial and trailing; names in lower case."""
        return [head for kept in self.received for head in _grpc_heads(bytes(kept))]


@contextmanager
def tapped(address: str) -> Iterator[Tap]:
    """A tap before the server at host:port."""
    host, port = address.rsplit(":", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tap = Tap((host, int(port)), listener)
        thread = threading.Thread(target=tap.serve, daemon=True)
        thread.start()
        yield tap
        tap.end()
        thread.join(5)


def _http_heads(received: bytes) -> Iterator[tuple[int, Headers]]:
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        yield int(status.split()[1]), headers
        received = rest[int(headers.get("content-length", "0")) :]


def _grpc_heads(received: bytes) -> Iterator[Headers]:
    decoder, block = Decoder(), b""
    while len(received) >= 9:
        frame, length = Frame.parse_frame_header(memoryview(received[:9]))
        if len(received) < 9 + length:
            return
        frame.parse_body(memoryview(received[9 : 9 + length]))
        received = received[9 + length :]
        if isinstance(frame, HeadersFrame | ContinuationFrame):
            block += frame.data
            if "END_HEADERS" in frame.flags:
                yield {str(name): str(value) for name, value in decoder.decode(block)}
                block = b""
