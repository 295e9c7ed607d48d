"""HTTP status, gRPC status code and retry delay of each error, for all transports and engines."""

import math
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
    errors.ModelNotFound: ErrorCodes(404, 5),  # NOT_FOUND
    errors.ModelNotReady: ErrorCodes(503, 14),
    errors.EngineUnavailable: ErrorCodes(503, 14),
    errors.Overloaded: ErrorCodes(503, 14),
    errors.StorageFull: ErrorCodes(507, 8),
    errors.DeadlineExceeded: ErrorCodes(504, 4),  # DEADLINE_EXCEEDED
    errors.NotSupported: ErrorCodes(501, 12),  # UNIMPLEMENTED
    errors.EngineFailed: ErrorCodes(500, 13),  # INTERNAL
    errors.OutOfMemory: ErrorCodes(503, 8),
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


def codes_of(error: InferenceError) -> ErrorCodes:
    """Codes of the nearest class in the table."""
    return next(ERROR_CODES[kind] for kind in type(error).__mro__ if kind in ERROR_CODES)


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
