"""HTTP status of each error, JSON responses, responses that close a connection, and the interface that counts
requests.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec
from starlette.responses import Response

from penstock.protocol.errors import (
    AccessUnavailable,
    BodyTooSlow,
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    HostNotAllowed,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    ModelUnavailable,
    NotSupported,
    OutOfMemory,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    TooLarge,
    Unauthenticated,
    UnsupportedMedia,
    retry_after_whole_s,
)

HTTP_STATUS: Mapping[type[InferenceError], int] = {
    InvalidRequest: 400,
    TooLarge: 413,
    UnsupportedMedia: 415,
    BodyTooSlow: 408,
    HostNotAllowed: 421,
    Unauthenticated: 401,
    AccessUnavailable: 503,
    PermissionDenied: 403,
    QuotaExceeded: 429,
    ModelNotFound: 404,
    ModelNotReady: 503,
    EngineUnavailable: 503,
    Overloaded: 503,
    DeadlineExceeded: 504,
    NotSupported: 501,
    EngineFailed: 500,
    OutOfMemory: 503,
    InferenceError: 500,
}
RETRYABLE_ERRORS = (AccessUnavailable, EngineUnavailable, ModelUnavailable, OutOfMemory, Overloaded, QuotaExceeded)
CLIENT_GONE = 499
_JSON = "application/json"


class ClientDisconnected(Exception):
    """The client closed the connection before its answer. Raised by body and disconnect; no response is sent."""


def status_of(error: InferenceError) -> int:
    """By the nearest class that the table knows."""
    return next(HTTP_STATUS[known] for known in type(error).__mro__ if known in HTTP_STATUS)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """content: what msgspec can encode."""
    return Response(msgspec.json.encode(content), status, headers, _JSON)


def error_response(text: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """The form of every error: {"error": text}."""
    return json_response({"error": text}, status, headers)


def response_of(error: InferenceError) -> Response:
    """The error as the table says; 503 and 429 say when to come back, in whole seconds; 401 how to say who one is."""
    status = status_of(error)
    headers = _retry_after(error) if status in (429, 503) else None
    if status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return error_response(error.message, status, headers)


def _retry_after(error: InferenceError) -> dict[str, str] | None:
    """Randomly spread, except for a client's own quota. None if waiting does not help."""
    known = error.retry_after_s if isinstance(error, RETRYABLE_ERRORS) else 0.0
    if known is None:
        return None
    is_own = isinstance(error, QuotaExceeded)
    return {"Retry-After": str(max(1, math.ceil(known)) if is_own else retry_after_whole_s(known))}


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
    """400 for what is not HTTP/1.1."""
    return ClosingResponse(HTTPStatus.BAD_REQUEST, "malformed_http", text)


MALFORMED = malformed("the request is not valid HTTP/1.1")
CHUNK_FRAMING = ClosingResponse(
    HTTPStatus.BAD_REQUEST,
    "chunk_framing",
    "the body's chunks have more framing than data; send larger chunks, without extensions",
)


class RequestRecorder(Protocol):
    """Counts requests; penstock.gateway.metrics.Metrics is one."""

    def request_done(self, *, model: str, protocol: str, code: str, seconds: float) -> None:
        """An inference request was answered. model: a bounded label."""
        ...

    def rejected(self, reason: str) -> None:
        """The gateway refused or failed a request itself. reason: an error class's stable word."""
        ...

    def cancelled(self, protocol: str) -> None:
        """A client went away before its answer."""
        ...
