"""HTTP transport on urllib3, with a connection pool for threads. Every response has a deadline and a size limit."""

import http.client
import math
import os
import socket
import ssl
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from penstock.client.operations import HttpReply
from penstock.client.options import ClientOptions
from penstock.client.replies import Attempt, closed_without_response, connection_error, not_http, too_large
from penstock.network import client_context
from penstock.protocol.errors import InferenceError, InvalidRequest

_CHUNK_BYTES = 1 << 18


class HttpTransport:
    """Sends requests to one gateway. Thread-safe."""

    def __init__(self, options: ClientOptions) -> None:
        """Opens no connection. Raises InvalidRequest for an unusable client certificate."""
        self._options = options
        host = f"[{options.host}]" if ":" in options.host else options.host
        shared: dict[str, Any] = {"maxsize": options.connections, "block": False, "retries": False}
        self._pool: urllib3.HTTPConnectionPool
        if options.is_tls:
            context = client_context()
            context.sslsocket_class = _TimedSslSocket
            self._pool = urllib3.HTTPSConnectionPool(host, options.port, ssl_context=context, **shared)
            self._pool.ConnectionCls = _TlsConnection
        else:
            self._pool = urllib3.HTTPConnectionPool(host, options.port, **shared)
            self._pool.ConnectionCls = _Connection

    def send(self, attempt: Attempt) -> HttpReply:
        """The complete response. Raises ConnectionFailed, GatewayUnreachable, DeadlineExceeded, InvalidRequest."""
        operation = attempt.operation
        if isinstance(operation.body, bytes):
            return self._send(attempt, operation.body)
        try:
            file = operation.body.open("rb")
        except OSError as error:
            raise InvalidRequest(f"{operation.body} cannot be read ({error.strerror})") from error
        with file:
            return self._send(attempt, file, {"content-length": str(os.fstat(file.fileno()).st_size)})

    def close(self) -> None:
        """Closes the idle connections."""
        self._pool.close()

    def _send(self, attempt: Attempt, body: Any, more_headers: Mapping[str, str] = MappingProxyType({})) -> HttpReply:
        limit_bytes = min(attempt.operation.max_response_bytes, self._options.max_response_bytes)
        try:
            answer = self._pool.urlopen(
                attempt.operation.method,
                attempt.target,
                body,
                {**attempt.headers, **more_headers},
                redirect=False,
                timeout=urllib3.Timeout(total=attempt.timeout_s),
                preload_content=False,
                decode_content=False,
            )
            with answer:
                content = self._content(answer, limit_bytes)
        except (urllib3.exceptions.HTTPError, OSError, http.client.HTTPException) as error:
            raise self._failure(error, attempt.timeout_s) from None  # the message contains the cause
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return HttpReply(answer.status, answer.reason or "", headers, content)

    def _content(self, answer: urllib3.BaseHTTPResponse, limit_bytes: int) -> bytes:
        """The body. The connection is closed, not reused, if the body exceeds the limit."""
        length = answer.headers.get("content-length", "")
        if length.isascii() and length.isdecimal() and int(length) <= min(limit_bytes, _CHUNK_BYTES):
            content = answer.read()
            answer.release_conn()
            return content
        parts, size_bytes = [], 0
        while chunk := answer.read(_CHUNK_BYTES):
            size_bytes += len(chunk)
            if size_bytes > limit_bytes:
                answer.close()
                raise too_large(self._options, limit_bytes)
            parts.append(chunk)
        answer.release_conn()
        return b"".join(parts)

    def _failure(self, error: BaseException, timeout_s: float) -> InferenceError:
        """Converts an exception of urllib3 by its cause: an OSError or an exception of http.client."""
        cause = _root(error)
        match cause:
            case urllib3.exceptions.TimeoutError():
                return connection_error(TimeoutError(), self._options, timeout_s)
            case http.client.RemoteDisconnected():
                return closed_without_response(self._options)
            case http.client.BadStatusLine():
                return not_http(self._options)
        return connection_error(cause, self._options, timeout_s)


def _root(error: BaseException) -> BaseException:
    """The innermost cause. urllib3 passes causes as an argument or as __cause__."""
    for cause in (*error.args[::-1], error.__cause__, error.__context__):
        if isinstance(cause, OSError | http.client.HTTPException | urllib3.exceptions.HTTPError):
            return _root(cause) if isinstance(cause, urllib3.exceptions.HTTPError) else cause
    return error


class _Timed:
    """A socket with one deadline for all reads, so that a server that sends slowly cannot extend it."""

    until = math.inf

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        left_s = self.until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if left_s < math.inf:
            cast("socket.socket", self).settimeout(left_s)
        return cast(int, super().recv_into(*args, **kwargs))  # type: ignore[misc]


class _TimedSocket(_Timed, socket.socket):
    pass


class _TimedSslSocket(_Timed, ssl.SSLSocket):
    pass


def _set_deadline(connection: HTTPConnection) -> None:
    """Called before the response is read. urllib3 sets connection.timeout to the remaining time."""
    left_s = connection.timeout
    if isinstance(connection.sock, _Timed):
        connection.sock.until = time.monotonic() + left_s if isinstance(left_s, float | int) else math.inf


class _Connection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        connected = super()._new_conn()
        timeout_s = connected.gettimeout()
        timed = _TimedSocket(fileno=connected.detach())
        timed.settimeout(timeout_s)
        return timed

    def getresponse(self) -> Any:
        _set_deadline(self)
        return super().getresponse()


class _TlsConnection(HTTPSConnection):
    def getresponse(self) -> Any:
        _set_deadline(self)
        return super().getresponse()
