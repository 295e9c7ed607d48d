"""The one table of errors over REST, and the form in which they are told."""

import math
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from server.core.errors import (
    AccessUnavailable,
    BackendFailed,
    BackendUnavailable,
    BodyTooSlow,
    DeadlineExceeded,
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
)
from server.core.retry_after import spread_whole_s

STATUS: Mapping[type[InferenceError], int] = {
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
    BackendUnavailable: 503,
    Overloaded: 503,
    DeadlineExceeded: 504,
    NotSupported: 501,
    BackendFailed: 500,
    OutOfMemory: 503,
    InferenceError: 500,
}
WAITING_HELPS = (AccessUnavailable, BackendUnavailable, ModelUnavailable, OutOfMemory, Overloaded, QuotaExceeded)
CLIENT_GONE = 499
_JSON = "application/json"


class ClientDisconnected(Exception):
    """The client closed the connection before its answer. By body and disconnect; nobody is left to tell."""


def status_of(error: InferenceError) -> int:
    """By the nearest class that the table knows."""
    return next(STATUS[known] for known in type(error).__mro__ if known in STATUS)


class _JsonAnswer(Response):
    """What Starlette makes of a JSON text without headers of its own, in half the time."""

    def __init__(self, body: bytes, status: int) -> None:
        self.status_code = status
        self.body = body
        self.background = None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", _JSON.encode())]


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """content: what msgspec can encode."""
    body = msgspec.json.encode(content)
    return _JsonAnswer(body, status) if headers is None else Response(body, status, headers, _JSON)


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
    known = error.retry_after_s if isinstance(error, WAITING_HELPS) else 0.0
    if known is None:
        return None
    is_own = isinstance(error, QuotaExceeded)
    return {"Retry-After": str(max(1, math.ceil(known)) if is_own else spread_whole_s(known))}
