"""HTTP status and gRPC status code of each error that the embedded engine or the batcher returns."""

from typing import NamedTuple

import msgspec

from penstock.protocol.call import GrpcAnswer, HttpAnswer
from penstock.protocol.errors import (
    EngineFailed,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    NotSupported,
    RegionTaken,
    TooLarge,
)
from penstock.protocol.http_inference import JSON_TYPE


class ErrorCodes(NamedTuple):
    """http: status. grpc: number of the status code."""

    http: int
    grpc: int


_CODES: dict[type[InferenceError], ErrorCodes] = {
    InvalidRequest: ErrorCodes(400, 3),  # INVALID_ARGUMENT
    RegionTaken: ErrorCodes(400, 6),  # ALREADY_EXISTS
    TooLarge: ErrorCodes(413, 8),  # RESOURCE_EXHAUSTED
    ModelNotFound: ErrorCodes(404, 5),  # NOT_FOUND
    ModelNotReady: ErrorCodes(503, 14),  # UNAVAILABLE
    NotSupported: ErrorCodes(501, 12),  # UNIMPLEMENTED
    EngineFailed: ErrorCodes(500, 13),  # INTERNAL
}
ENGINE_ERRORS = tuple(_CODES)  # all other errors are the gateway's: no slot, or the deadline passed


def encode_http_error(error: InferenceError) -> HttpAnswer:
    """{"error": text} with its status. error: one of ANSWERED."""
    return encode_http_text(_codes(error).http, error.message)


def encode_http_text(status: int, text: str) -> HttpAnswer:
    """The form of every error over HTTP."""
    return HttpAnswer(status, (JSON_TYPE,), msgspec.json.encode({"error": text}))


def encode_grpc_error(error: InferenceError) -> GrpcAnswer:
    """The status code and its details. error: one of ANSWERED."""
    return GrpcAnswer(_codes(error).grpc, details=error.message)


def _codes(error: InferenceError) -> ErrorCodes:
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
