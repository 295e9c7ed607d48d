"""Our errors as gRPC's status codes: the one table, and the metadata that goes with a refusal."""

from typing import NamedTuple

import grpc

from server.core.errors import (
    AccessUnavailable,
    BackendFailed,
    BackendUnavailable,
    DeadlineExceeded,
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
    RegionTaken,
    TooLarge,
    Unauthenticated,
)
from server.core.relay import GrpcAnswer, GrpcMetadata
from server.core.retry_after import spread_s

RETRY_AFTER_KEY = "retry-after"

TABLE: dict[type[InferenceError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RegionTaken: grpc.StatusCode.ALREADY_EXISTS,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    AccessUnavailable: grpc.StatusCode.UNAVAILABLE,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    ModelNotReady: grpc.StatusCode.UNAVAILABLE,
    BackendUnavailable: grpc.StatusCode.UNAVAILABLE,
    Overloaded: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    NotSupported: grpc.StatusCode.UNIMPLEMENTED,
    BackendFailed: grpc.StatusCode.INTERNAL,
    OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    InferenceError: grpc.StatusCode.INTERNAL,
}
# What gRPC says in the engine, as INTERNAL, of a message that is no such message.
_UNREADABLE = "Unable to parse request"
WAITING_HELPS = (AccessUnavailable, BackendUnavailable, ModelUnavailable, OutOfMemory, Overloaded, QuotaExceeded)
CODE_OF_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class Status(NamedTuple):
    """How a call ends that did not go well."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: GrpcMetadata = ()


def code_of(answer: GrpcAnswer) -> grpc.StatusCode:
    """The engine's own code, but INVALID_ARGUMENT for a message that it could not read."""
    code = CODE_OF_NUMBER.get(answer.code, grpc.StatusCode.UNKNOWN)
    is_callers_mistake = code is grpc.StatusCode.INTERNAL and answer.details == _UNREADABLE
    return grpc.StatusCode.INVALID_ARGUMENT if is_callers_mistake else code


def status_of(error: InferenceError) -> Status:
    """A class without a row of its own has its parent's. `retry-after`: seconds, where waiting helps; spread but for a
    quota, which is the caller's own.
    """
    code = next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)
    known = error.retry_after_s if isinstance(error, WAITING_HELPS) else None
    if known is not None:
        seconds = known if isinstance(error, QuotaExceeded) else spread_s(known)
        return Status(code, error.message, ((RETRY_AFTER_KEY, f"{seconds:g}"),))
    return Status(code, error.message)


def code_name_of(error: InferenceError) -> str:
    """The name of an error's gRPC status code, such as NOT_FOUND."""
    return status_of(error).code.name
