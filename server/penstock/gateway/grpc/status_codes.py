"""Status of a gRPC call that ends without a response, and its trailing metadata."""

from typing import NamedTuple

import grpc

from penstock.gateway.metrics import Metrics, note_refused
from penstock.logs import get_logger
from penstock.protocol.call import GrpcAnswer, GrpcMetadata
from penstock.protocol.error_codes import REASON_HEADER, codes_of, retry_after
from penstock.protocol.errors import InferenceError

RETRY_AFTER_KEY = "retry-after"
# gRPC's message in the engine, as INTERNAL, for a malformed request.
_UNREADABLE = "Unable to parse request"
log = get_logger("grpc")
CODE_OF_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class CallStatus(NamedTuple):
    """Status of a failed call."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: GrpcMetadata = ()


def code_of(answer: GrpcAnswer) -> grpc.StatusCode:
    """The engine's code, but INVALID_ARGUMENT for a malformed request."""
    code = CODE_OF_NUMBER.get(answer.code, grpc.StatusCode.UNKNOWN)
    is_callers_mistake = code is grpc.StatusCode.INTERNAL and answer.details == _UNREADABLE
    return grpc.StatusCode.INVALID_ARGUMENT if is_callers_mistake else code


def status_of(error: InferenceError) -> CallStatus:
    """The error's status, with its reason, and `retry-after` in seconds if waiting helps."""
    code, seconds = CODE_OF_NUMBER[codes_of(error).grpc], retry_after(error)
    reason = (REASON_HEADER, error.reason)
    return CallStatus(
        code, error.message, (reason,) if seconds is None else (reason, (RETRY_AFTER_KEY, f"{seconds:g}"))
    )


def refusal_of(record: Metrics, error: InferenceError) -> CallStatus:
    """The status of a refused call, which is counted and logged."""
    note_refused(record, log, error)
    return status_of(error)


def code_name_of(error: InferenceError) -> str:
    """The name of an error's gRPC status code, such as NOT_FOUND."""
    return status_of(error).code.name
