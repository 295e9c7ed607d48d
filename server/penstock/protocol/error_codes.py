"""HTTP status and gRPC status code of each error that the embedded engine or the batcher returns."""

from typing import NamedTuple

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


def codes_of(error: InferenceError) -> ErrorCodes:
    """By the nearest class in the table."""
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
