"""HTTP POST with a deadline for the whole exchange: a socket's own time-out begins anew with every byte that comes."""

import http.client
import io
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from urllib3 import HTTPConnectionPool, connection_from_url
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.response import BaseHTTPResponse
from urllib3.util import parse_url

from deepstream_pipeline.sinks.reach import require_allowed_peer
from server.core.outbound import Outbound

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

AT_ONCE_S = 0.001  # 0 would mean not to wait at all, which is another kind of error


class TimelyPost:
    """One kept connection to one address, of one thread. timeout_s: from connecting to the end of what is read of the
    answer. Not in it is looking up the name; of a host with several addresses each may take that long to connect.
    outbound: which addresses may be connected to."""

    def __init__(self, url: str, timeout_s: float, outbound: Outbound) -> None:
        self._deadline, self._timeout_s = _Deadline(), timeout_s
        self._target = parse_url(url).request_uri
        plain, with_tls = _connections(self._deadline, outbound)
        self._pool: HTTPConnectionPool = connection_from_url(url, maxsize=1, timeout=timeout_s, retries=False)
        self._pool.ConnectionCls = with_tls if self._pool.scheme == "https" else plain

    def post(self, body: bytes, headers: Mapping[str, str]) -> BaseHTTPResponse:
        """The response, whose body is not read yet. Does not follow redirects.

        Raises urllib3's errors, OSError, and LinkDown for an address that is not allowed.
        """
        self._deadline.begin(self._timeout_s)
        return self._pool.urlopen(
            "POST",
            self._target,
            body=body,
            headers=headers,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )

    def close(self) -> None:
        """Closes the connection."""
        self._pool.close()


class _Deadline:
    """When the exchange that runs is to be over."""

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    @property
    def left_s(self) -> float:
        """For a socket's time-out."""
        return max(self._until - time.monotonic(), AT_ONCE_S)


class _TimelyBytes(io.RawIOBase):
    """What a socket receives until the deadline; then TimeoutError, also where bytes keep coming."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: _Deadline) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int | None:
        if self._deadline.is_over:
            raise TimeoutError("the answer takes too long")
        self._sock.settimeout(self._deadline.left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _connections(deadline: _Deadline, outbound: Outbound) -> tuple[type[HTTPConnection], type[HTTPSConnection]]:
    """urllib3's connection classes, without and with TLS, with the deadline and the check of addresses."""

    class Answer(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, debuglevel: int = 0, method: str | None = None) -> None:
            super().__init__(sock, debuglevel, method)
            self.fp = io.BufferedReader(_TimelyBytes(self.fp.detach(), sock, deadline))

    class Connection(HTTPConnection):
        response_class = Answer

        def _new_conn(self) -> socket.socket:
            self.timeout = deadline.left_s
            sock = super()._new_conn()
            require_allowed_peer(sock, self.host, outbound)
            sock.settimeout(deadline.left_s)
            return sock

        def send(self, data: object) -> None:
            if self.sock is not None:
                self.sock.settimeout(deadline.left_s)
            super().send(data)  # type: ignore[arg-type]

    class TlsConnection(Connection, HTTPSConnection):
        """The same: HTTPSConnection puts TLS on what Connection connects."""

    return Connection, TlsConnection
