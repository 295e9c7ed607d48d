"""Plain HTTP calls, so that a test sees status, headers and body as they are on the wire."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(
    method: str, url: str, body: bytes | None = None, headers: dict[str, str] | None = None, timeout_s: float = 30.0
) -> Answer:
    """One request on a connection of its own; header names in lower case."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target, body=body, headers=headers or {})
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, response.read())
    finally:
        connection.close()


def post_json(url: str, payload: Any, **headers: str) -> Answer:
    return call("POST", url, json.dumps(payload).encode(), {"content-type": "application/json", **headers})
