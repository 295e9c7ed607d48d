"""A raw HTTP/2 connection to a gRPC port, for what no gRPC client would send."""

import socket
import time
from types import TracebackType
from typing import Self

import h2.config
import h2.connection
import h2.events

HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelStreamInfer"),
    (":authority", "x"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
CANCEL = 8


class RawHttp2:
    """Frames out, events in. is_over: whether the server has ended the connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 10)
        self.frames = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.frames.initiate_connection()
        self.is_over = False
        self.flush()
        self.receive(0.5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def open_stream(self) -> int:
        """A call's head without a message; its number."""
        number: int = self.frames.get_next_available_stream_id()
        self.frames.send_headers(number, HEADERS)
        return number

    def make_server_reset(self, number: int) -> None:
        """The start of a message over the limit, for which the server resets the stream (MadeYouReset)."""
        self.frames.send_data(number, b"\0\x7f\xff\xff\xff")
        self.flush()

    def flush(self) -> None:
        """Send what is prepared; a connection that is over takes nothing."""
        try:
            self._socket.sendall(self.frames.data_to_send())
        except (BrokenPipeError, ConnectionResetError):
            self.is_over = True

    def receive(self, seconds: float) -> list[h2.events.Event]:
        """What comes within that time."""
        events: list[h2.events.Event] = []
        until = time.monotonic() + seconds
        while not self.is_over and (left_s := until - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                received = self._socket.recv(1 << 16)
            except TimeoutError:
                break
            except ConnectionResetError:
                received = b""
            if not received:
                self.is_over = True
                break
            events += self.frames.receive_data(received)
            self.flush()
        return events
