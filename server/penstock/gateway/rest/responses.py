"""JSON responses, and responses that close a connection."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from penstock.protocol.cancellation import ClientLeft
from penstock.protocol.error_codes import REASON_HEADER, codes_of, http_retry_after
from penstock.protocol.errors import InferenceError, retry_after_whole_s

CLIENT_GONE = 499
_JSON = "application/json"


class ClientDisconnected(ClientLeft):
    """The client closed the connection before its answer. Raised by body and disconnect; no response is sent."""


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """content: any type that msgspec can encode."""
    return Response(msgspec.json.encode(content), status, headers, _JSON)


def error_response(text: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """The form of every error: {"error": text}."""
    return json_response({"error": text}, status, headers)


def response_of(error: InferenceError) -> Response:
    """The error with its status. 503, 429: with Retry-After in whole seconds; 401: with WWW-Authenticate."""
    status, seconds = codes_of(error).http, http_retry_after(error)
    headers = {REASON_HEADER: error.reason}
    if seconds is not None:
        headers["Retry-After"] = str(seconds)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return error_response(error.message, status, headers)


@dataclass(frozen=True, slots=True)
class ClosingResponse:
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
            lines.append(f"retry-after: {retry_after_whole_s(1.0)}")
        return "\r\n".join([*lines, "", ""]).encode() + body


def malformed(text: str) -> ClosingResponse:
    """400 for a request that is not HTTP/1.1."""
    return ClosingResponse(HTTPStatus.BAD_REQUEST, "malformed_http", text)


MALFORMED = malformed("the request is not valid HTTP/1.1")
CHUNK_FRAMING = ClosingResponse(
    HTTPStatus.BAD_REQUEST,
    "chunk_framing",
    "the body's chunks have more framing than data; send larger chunks, without extensions",
)
