"""HTTP status, gRPC status code and retry delay of each error, for all transports and engines."""

import math
from functools import cache
from typing import NamedTuple

from penstock.protocol import errors
from penstock.protocol.errors import InferenceError, ModelUnavailable, QuotaExceeded, retry_after_s, retry_after_whole_s


class ErrorCodes(NamedTuple):
    """http: status. grpc: number of the status code."""

    http: int
    grpc: int


ERROR_CODES: dict[type[InferenceError], ErrorCodes] = {
    errors.InvalidRequest: ErrorCodes(400, 3),  # INVALID_ARGUMENT
    errors.TooLarge: ErrorCodes(413, 8),  # RESOURCE_EXHAUSTED
    errors.UnsupportedMedia: ErrorCodes(415, 3),
    errors.HostNotAllowed: ErrorCodes(421, 3),
    errors.BodyTooSlow: ErrorCodes(408, 3),
    errors.RegionTaken: ErrorCodes(400, 6),  # ALREADY_EXISTS
    errors.Unauthenticated: ErrorCodes(401, 16),  # UNAUTHENTICATED
    errors.AccessUnavailable: ErrorCodes(503, 14),  # UNAVAILABLE
    errors.PermissionDenied: ErrorCodes(403, 7),  # PERMISSION_DENIED
    errors.QuotaExceeded: ErrorCodes(429, 8),
    errors.Conflict: ErrorCodes(409, 10),  # ABORTED
    errors.ModelNotFound: ErrorCodes(404, 5),  # NOT_FOUND
    errors.ModelNotReady: ErrorCodes(503, 14),
    errors.EngineUnavailable: ErrorCodes(503, 14),
    errors.Overloaded: ErrorCodes(503, 14),
    errors.StorageFull: ErrorCodes(507, 8),
    errors.DeadlineExceeded: ErrorCodes(504, 4),  # DEADLINE_EXCEEDED
    errors.NotSupported: ErrorCodes(501, 12),  # UNIMPLEMENTED
    errors.EngineFailed: ErrorCodes(500, 13),  # INTERNAL
    errors.OutOfMemory: ErrorCodes(503, 8),
    errors.ConnectionFailed: ErrorCodes(502, 14),
    errors.InferenceError: ErrorCodes(500, 13),
}
# Errors that an engine returns. All others are the gateway's: no slot, or the deadline passed.
ENGINE_ERRORS = (
    errors.InvalidRequest,
    errors.ModelNotFound,
    errors.ModelNotReady,
    errors.NotSupported,
    errors.EngineFailed,
)
_HTTP_WITH_RETRY_AFTER = (429, 503)
REASON_HEADER = "x-penstock-reason"  # InferenceError.reason, since several errors share a status; also gRPC's metadata


def codes_of(error: InferenceError) -> ErrorCodes:
    """Codes of the nearest class in the table."""
    return _codes_of_kind(type(error))


def retry_after(error: InferenceError) -> float | None:
    """Seconds until a retry, None if waiting does not help. Randomly spread, except for a client's own quota."""
    known_s = error.retry_after_s
    return known_s if known_s is None or isinstance(error, QuotaExceeded) else retry_after_s(known_s)


def http_retry_after(error: InferenceError) -> int | None:
    """The same in whole seconds, at least 1. Every 429 and 503 has one, unless waiting for the model does not help."""
    known_s = error.retry_after_s
    if codes_of(error).http not in _HTTP_WITH_RETRY_AFTER or (known_s is None and isinstance(error, ModelUnavailable)):
        return None
    if isinstance(error, QuotaExceeded):
        return max(1, math.ceil(known_s or 0.0))
    return retry_after_whole_s(known_s or 0.0)


# The likeliest error of each status, for a response without a reason: of an engine, or of a proxy.
_HTTP_ERRORS: dict[int, type[InferenceError]] = {
    401: errors.Unauthenticated,
    403: errors.PermissionDenied,
    404: errors.ModelNotFound,
    408: errors.BodyTooSlow,
    413: errors.TooLarge,
    415: errors.UnsupportedMedia,
    421: errors.HostNotAllowed,
    429: errors.QuotaExceeded,
    500: errors.EngineFailed,
    501: errors.NotSupported,
    503: errors.Overloaded,
    504: errors.DeadlineExceeded,
    507: errors.StorageFull,
}
_GRPC_ERRORS: dict[int, type[InferenceError]] = {
    3: errors.InvalidRequest,
    4: errors.DeadlineExceeded,
    5: errors.ModelNotFound,
    6: errors.RegionTaken,
    7: errors.PermissionDenied,
    8: errors.TooLarge,
    12: errors.NotSupported,
    13: errors.EngineFailed,
    14: errors.Overloaded,
    16: errors.Unauthenticated,
}


def error_of_http(status: int, message: str, reason: str = "", retry_after_s: float | None = None) -> InferenceError:
    """The error that a response stands for. status: 4xx or 5xx. reason: by REASON_HEADER; empty for none."""
    kind = _error_named(reason)
    if kind is None or _codes_of_kind(kind).http != status:
        kind = _HTTP_ERRORS.get(status, errors.InvalidRequest if status < 500 else InferenceError)
    return _error(kind, message, reason, retry_after_s)


def error_of_grpc(code: int, message: str, reason: str = "", retry_after_s: float | None = None) -> InferenceError:
    """The error that a gRPC status stands for. code: its number."""
    kind = _error_named(reason)
    if kind is None or _codes_of_kind(kind).grpc != code:
        kind = _GRPC_ERRORS.get(code, InferenceError)
    return _error(kind, message, reason, retry_after_s)


def _error(kind: type[InferenceError], message: str, reason: str, retry_after_s: float | None) -> InferenceError:
    error = kind(message)
    error.retry_after_s = retry_after_s
    if isinstance(error, errors.Overloaded) and reason:
        error.reason = reason
    return error


@cache
def _error_named(reason: str) -> type[InferenceError] | None:
    todo: list[type[InferenceError]] = [InferenceError]
    found: dict[str, type[InferenceError]] = {}
    while todo:
        kind = todo.pop()
        found.setdefault(kind.reason, kind)  # a class without a reason of its own has its parent's
        todo += kind.__subclasses__()
    return found.get(reason)


def _codes_of_kind(kind: type[InferenceError]) -> ErrorCodes:
    return next(ERROR_CODES[each] for each in kind.__mro__ if each in ERROR_CODES)
