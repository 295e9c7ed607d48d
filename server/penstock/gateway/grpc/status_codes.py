"""gRPC status code of each error, and the metadata that is sent with it."""

from typing import NamedTuple

import grpc

from penstock.protocol.call import GrpcAnswer, GrpcMetadata
from penstock.protocol.errors import (
    AccessUnavailable,
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
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
    retry_after_s,
)

RETRY_AFTER_KEY = "retry-after"

GRPC_STATUS: dict[type[InferenceError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RegionTaken: grpc.StatusCode.ALREADY_EXISTS,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    AccessUnavailable: grpc.StatusCode.UNAVAILABLE,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    ModelNotReady: grpc.StatusCode.UNAVAILABLE,
    EngineUnavailable: grpc.StatusCode.UNAVAILABLE,
    Overloaded: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    NotSupported: grpc.StatusCode.UNIMPLEMENTED,
    EngineFailed: grpc.StatusCode.INTERNAL,
    OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    InferenceError: grpc.StatusCode.INTERNAL,
}
# What gRPC says in the engine, as INTERNAL, of a message that is no such message.
_UNREADABLE = "Unable to parse request"
RETRYABLE_ERRORS = (AccessUnavailable, EngineUnavailable, ModelUnavailable, OutOfMemory, Overloaded, QuotaExceeded)
CODE_OF_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class CallStatus(NamedTuple):
    """How a call ends that did not go well."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: GrpcMetadata = ()


def code_of(answer: GrpcAnswer) -> grpc.StatusCode:
    """The engine's own code, but INVALID_ARGUMENT for a message that it could not read."""
    code = CODE_OF_NUMBER.get(answer.code, grpc.StatusCode.UNKNOWN)
    is_callers_mistake = code is grpc.StatusCode.INTERNAL and answer.details == _UNREADABLE
    return grpc.StatusCode.INVALID_ARGUMENT if is_callers_mistake else code


def status_of(error: InferenceError) -> CallStatus:
    """A class without a row of its own has its parent's. `retry-after`: seconds, where waiting helps; spread but for a
    quota, which is the caller's own.
    """
    code = next(GRPC_STATUS[kind] for kind in type(error).__mro__ if kind in GRPC_STATUS)
    known = error.retry_after_s if isinstance(error, RETRYABLE_ERRORS) else None
    if known is not None:
        seconds = known if isinstance(error, QuotaExceeded) else retry_after_s(known)
        return CallStatus(code, error.message, ((RETRY_AFTER_KEY, f"{seconds:g}"),))
    return CallStatus(code, error.message)


def code_name_of(error: InferenceError) -> str:
    """The name of an error's gRPC status code, such as NOT_FOUND."""
    return status_of(error).code.name
