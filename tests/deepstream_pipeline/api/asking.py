"""A client of the control API: one request, one answer, over its own connection or one that it keeps."""

import http.client
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Answer:
    """status, headers in lower case, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        """The body, as a JSON object."""
        read = json.loads(self.body)
        assert isinstance(read, dict), read
        return read

    @property
    def error(self) -> str:
        """The text of a refusal: the body holds it as `error`, and never FastAPI's `detail`."""
        assert "detail" not in self.json
        return str(self.json["error"])


class Client:
    """Asks over one connection that is kept."""

    def __init__(self, url: str, timeout_s: float = 20.0) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)

    def ask(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Answer:
        """body: bytes as they are, anything else as JSON. headers: JSON's type where there is a body, unless given."""
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = (JSON if sent is not None else {}) if headers is None else headers
        self._connection.request(method, path, body=sent, headers=dict(given))
        answer = self._connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())

    def close(self) -> None:
        self._connection.close()


def ask(url: str, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Answer:
    """Over a connection of its own."""
    client = Client(url)
    try:
        return client.ask(method, path, body, headers)
    finally:
        client.close()


def connect(url: str, timeout_s: float = 20.0) -> socket.socket:
    """A plain connection."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=timeout_s)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        parts.append(b"")
    return b"".join(parts)


def send_on(connection: socket.socket, part: bytes, *, times: int, pause_s: float = 0.0) -> None:
    """Send it again and again. Raises OSError once the other side hung up."""
    for _ in range(times):
        connection.sendall(part)
        time.sleep(pause_s)
