"""Model loads that come over HTTP, asked over gRPC. Pure.

Triton 2.51 loads a model in the HTTP thread that took the request, and whoever else's connection is that thread's waits
until it is done: of eight connections that asked other models all the time, six had no answer for the 4.5 s of a load.
Its gRPC port loads aside, and nobody waits. Codes and words are the same on both ports.
"""

import json
import re

import msgspec
from tritonclient.grpc import service_pb2

from server.backends.call_traits import SERVICE
from server.core.errors import BackendUnavailable
from server.core.relay import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall

LOAD = SERVICE + "RepositoryModelLoad"
_TARGET = re.compile(rb"/v2/repository/models/([A-Za-z0-9._~-]+)/load")
_PLAIN_BYTES = 1 << 16  # a refusal may quote it, and has to fit the block of headers that it comes in
_STATUSES = {0: 200, 2: 400, 3: 400, 5: 404, 6: 400, 12: 501, 13: 500, 14: 503}  # Triton's
_HEADERS = ((b"content-type", b"application/json"),)


class _Parameters(msgspec.Struct, forbid_unknown_fields=True):
    config: str


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    parameters: _Parameters | None = None


def quiet_load(call: HttpCall) -> GrpcCall | None:
    """The same load over gRPC; None for anything else, and for a load that only HTTP's own words describe."""
    found = _TARGET.fullmatch(call.target) if call.method == "POST" else None
    if found is None or len(call.body) > _PLAIN_BYTES:
        return None
    try:
        said = msgspec.json.decode(call.body, type=_Body) if call.body else _Body()
    except (msgspec.MsgspecError, ValueError):  # ValueError: words that are no UTF-8
        return None
    question = service_pb2.RepositoryModelLoadRequest(model_name=found[1].decode())
    if said.parameters is not None:
        question.parameters["config"].string_param = said.parameters.config
    return GrpcCall(LOAD, question.SerializeToString())


def as_http(answer: GrpcAnswer) -> HttpAnswer:
    """The answer as Triton's HTTP port gives it. Raises BackendUnavailable for a call that ended without one."""
    if answer.code not in _STATUSES:
        raise BackendUnavailable(f"the engine ended a model's load without an answer: {answer.details}")
    body = json.dumps({"error": answer.details}, ensure_ascii=False, separators=(",", ":")) if answer.code else ""
    return HttpAnswer(_STATUSES[answer.code], _HEADERS, body.encode())
