"""Error responses that a connection sends before it closes."""

from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from server.core.retry_after import spread_whole_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error response that closes its connection. reason: a stable label for the metric."""

    status: HTTPStatus
    reason: str
    text: str

    def as_bytes(self) -> bytes:
        """The complete response."""
        body = msgspec.json.encode({"error": self.text})
        lines = [
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        if self.status is HTTPStatus.SERVICE_UNAVAILABLE:
            lines.append(f"retry-after: {spread_whole_s(1.0)}")
        return "\r\n".join([*lines, "", ""]).encode() + body


def malformed(text: str) -> Refusal:
    """400 for what is not HTTP/1.1."""
    return Refusal(HTTPStatus.BAD_REQUEST, "malformed_http", text)


MALFORMED = malformed("the request is not valid HTTP/1.1")
CHUNK_FRAMING = Refusal(
    HTTPStatus.BAD_REQUEST,
    "chunk_framing",
    "the body's chunks have more framing than data; send larger chunks, without extensions",
)
