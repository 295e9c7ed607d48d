"""Our errors as the embedded engine's answers: the one table, in both protocols."""

from typing import NamedTuple

import msgspec

from server.backends.wire.http_response import JSON_TYPE
from server.core.errors import (
    BackendFailed,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    NotSupported,
    RegionTaken,
    TooLarge,
)
from server.core.relay import GrpcAnswer, HttpAnswer


class Codes(NamedTuple):
    """http: status. grpc: number of the status code."""

    http: int
    grpc: int


_CODES: dict[type[InferenceError], Codes] = {
    InvalidRequest: Codes(400, 3),  # INVALID_ARGUMENT
    RegionTaken: Codes(400, 6),  # ALREADY_EXISTS
    TooLarge: Codes(413, 8),  # RESOURCE_EXHAUSTED
    ModelNotFound: Codes(404, 5),  # NOT_FOUND
    ModelNotReady: Codes(503, 14),  # UNAVAILABLE
    NotSupported: Codes(501, 12),  # UNIMPLEMENTED
    BackendFailed: Codes(500, 13),  # INTERNAL
}
ANSWERED = tuple(_CODES)  # every other error is nobody's answer: the engine's place, or the time, is gone


def http_error(error: InferenceError) -> HttpAnswer:
    """{"error": text} with its status. error: one of ANSWERED."""
    return plain_error(_codes(error).http, error.message)


def plain_error(status: int, text: str) -> HttpAnswer:
    """The form of every error over HTTP."""
    return HttpAnswer(status, (JSON_TYPE,), msgspec.json.encode({"error": text}))


def grpc_error(error: InferenceError) -> GrpcAnswer:
    """The status code and its details. error: one of ANSWERED."""
    return GrpcAnswer(_codes(error).grpc, details=error.message)


def _codes(error: InferenceError) -> Codes:
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
