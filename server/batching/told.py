"""Answers that carry what their requests are told of their batches, where they asked for it."""

from server.batching.explanation import HEADER, Explained, as_header, is_asked_by, is_asked_in
from server.core.relay import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall

_NAME = HEADER.encode()


def asks_http(call: HttpCall) -> bool:
    """Whether the caller wants to know."""
    return is_asked_by(call.headers)


def asks_grpc(call: GrpcCall) -> bool:
    """Whether the caller wants to know."""
    return bool(call.metadata) and is_asked_in(call.metadata)


def told_http(answer: HttpAnswer, told: Explained) -> HttpAnswer:
    """The answer with the explanation as a header; as it is where it has one, or is no answer of a model."""
    if answer.status != 200 or any(name == _NAME for name, _ in answer.headers):
        return answer
    return HttpAnswer(answer.status, (*answer.headers, (_NAME, as_header(told).encode())), answer.body)


def told_grpc(answer: GrpcAnswer, told: Explained) -> GrpcAnswer:
    """The same in the trailing metadata."""
    if answer.code or any(name == HEADER for name, _ in answer.trailing_metadata):
        return answer
    return GrpcAnswer(0, answer.message, answer.details, (*answer.trailing_metadata, (HEADER, as_header(told))))
