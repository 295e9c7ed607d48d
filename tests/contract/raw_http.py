"""Requests as they stand on the wire, and the answers to them, with nothing in between."""

import http.client
import socket
from dataclasses import dataclass

from penstock.protocol.call import HOP_BY_HOP, HttpCall, HttpHeaders

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RawAnswer:
    """headers: names in lower case, sorted, without those of the connection and the length. body: without chunks."""

    status: int
    headers: HttpHeaders
    body: bytes


def ask(url: str, call: HttpCall) -> RawAnswer:
    """One call over a connection of its own. url: http://host:port."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    lines = [b"%s %s HTTP/1.1" % (call.method.encode(), call.target), b"Host: localhost", b"Connection: close"]
    lines += [name + b": " + value for name, value in call.headers]
    if call.body or call.method not in ("GET", "HEAD", "OPTIONS"):
        lines.append(b"Content-Length: %d" % len(call.body))
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + call.body)
        answer = http.client.HTTPResponse(connection, method=call.method)
        answer.begin()
        body = answer.read()
    dropped = {name.decode() for name in HOP_BY_HOP} | {"content-length"}
    headers = sorted((name.lower().encode(), value.encode()) for name, value in answer.getheaders())
    return RawAnswer(answer.status, tuple(header for header in headers if header[0].decode() not in dropped), body)
