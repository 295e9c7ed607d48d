"""Properties of relayed calls (idempotency, model, sequence), and two rewrites.

* HTTP loads are sent to Triton over gRPC: Triton 2.51 loads in the HTTP thread, whose other connections would wait.
  Codes and texts are the same.
* Sequence IDs of clients with a key are replaced by a hash of key and ID, so that clients cannot reach each other's
  sequences.
"""

import hashlib
import json
import re
from urllib.parse import unquote

import msgspec
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from penstock.engines.concurrency import in_thread
from penstock.protocol.call import A, Call, GrpcAnswer, GrpcCall, HttpAnswer, HttpCall, InferHead
from penstock.protocol.codec import codec_of
from penstock.protocol.errors import EngineUnavailable
from penstock.protocol.http_body import HEADER_LENGTH
from penstock.protocol.identity import Identity

READS = ("GET", "HEAD")
SERVICE = "/inference.GRPCInferenceService/"
INFER_METHOD = SERVICE + "ModelInfer"
_REPEATABLE_POSTS = (b"/infer", b"/index", b"/generate", b"/generate_stream")
_CHANGING_METHODS = tuple(
    SERVICE + name for name in ("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings")
)
_CHANGING_POSTS = (b"/load", b"/unload", b"/trace/setting", b"/logging")
_SEQUENCE = b"sequence_id"
_MODELS, _REPOSITORY_MODELS = b"/v2/models/", b"/v2/repository/models/"
_LOADS = (SERVICE + "RepositoryModelLoad", SERVICE + "RepositoryModelUnload")
_ABOUT_ONE_MODEL = (  # requests that start with the model's name
    INFER_METHOD,
    *(SERVICE + name for name in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")),
)
INDEX_METHOD, INDEX_PATH = SERVICE + "RepositoryIndex", b"/v2/repository/index"


def may_repeat(call: Call[A]) -> bool:
    """Whether the call may be sent twice: reads, inferences outside sequences, no registration of shared memory."""
    if isinstance(call, GrpcCall):
        if call.method == INFER_METHOD:
            return _SEQUENCE not in call.message
        return call.method not in _CHANGING_METHODS and not call.method.endswith("Register")
    if not isinstance(call, HttpCall) or call.method in READS:
        return True
    if not _path(call).endswith(_REPEATABLE_POSTS) or _SEQUENCE in call.body:
        return False
    return not any(name == b"content-encoding" and value != b"identity" for name, value in call.headers)


def is_for_all_replicas(call: Call[A]) -> bool:
    """Whether the call goes to every replica: loads and settings. Over gRPC, reading settings is the same method."""
    if isinstance(call, GrpcCall):
        return call.method in _CHANGING_METHODS
    return isinstance(call, HttpCall) and call.method == "POST" and _path(call).endswith(_CHANGING_POSTS)


def load_change(call: Call[A]) -> tuple[str, bool] | None:
    """The model of a load (True) or an unload (False); None for other calls."""
    if isinstance(call, GrpcCall) and call.method in _LOADS:
        return named_by(call), call.method == LOAD_METHOD
    path = _path(call) if isinstance(call, HttpCall) and call.method == "POST" else b""
    if path.startswith(_REPOSITORY_MODELS) and path.endswith((b"/load", b"/unload")):
        return named_by(call), path.endswith(b"/load")
    return None


def is_index(call: Call[A]) -> bool:
    """Whether the call reads the repository's index."""
    if isinstance(call, HttpCall):
        return _path(call) == INDEX_PATH
    return isinstance(call, GrpcCall) and call.method == INDEX_METHOD


def model_of(call: Call[A]) -> str:
    """The model of an inference, over HTTP of any call about a model; else empty."""
    if isinstance(call, GrpcCall):
        return _first_field(call.message) if call.method == INFER_METHOD else ""
    path = _path(call) if isinstance(call, HttpCall) else b""
    return _path_segment(path, _MODELS) if path.startswith(_MODELS) else ""


def named_by(call: Call[A]) -> str:
    """The model that the call names, also in a load or unload; else empty."""
    if isinstance(call, GrpcCall):
        if call.method in _LOADS:
            return _loaded_model(call.message)
        return _first_field(call.message) if call.method in _ABOUT_ONE_MODEL else ""
    path = _path(call) if isinstance(call, HttpCall) else b""
    return _path_segment(path, _REPOSITORY_MODELS) if path.startswith(_REPOSITORY_MODELS) else model_of(call)


def sequence_of(call: Call[A]) -> str:
    """The sequence of an inference; empty for none, or if the call cannot be parsed."""
    try:
        if isinstance(call, GrpcCall):
            slot = service_pb2.ModelInferRequest.FromString(call.message).parameters.get("sequence_id")
            return "" if slot is None else _sequence_text(slot.string_param or slot.int64_param or slot.uint64_param)
        if isinstance(call, HttpCall):
            length = call.header(HEADER_LENGTH) or ""
            body = call.body[: int(length)] if length.isdigit() else call.body
            return _sequence_text(msgspec.json.decode(body, type=_Sequenced).parameters.get("sequence_id"))
    except (DecodeError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return ""


def _path_segment(path: bytes, prefix: bytes) -> str:
    return unquote(path.removeprefix(prefix).partition(b"/")[0].decode("latin-1"))


def _loaded_model(message: bytes) -> str:
    try:
        name: str = service_pb2.RepositoryModelLoadRequest.FromString(message).model_name
    except DecodeError:
        return ""
    return name


class _Sequenced(msgspec.Struct):
    parameters: dict[str, object] = {}


def _sequence_text(sequence: object) -> str:
    """0 and an empty string mean no sequence."""
    return str(sequence) if sequence and isinstance(sequence, int | str) else ""


def _path(call: HttpCall) -> bytes:
    return call.target.partition(b"?")[0]


def _first_field(message: bytes) -> str:
    """Field 1, a string. Fast if it comes first; otherwise parsed by protobuf."""
    if len(message) > 2 and message[0] == 0x0A and message[1] < 0x80:
        return message[2 : 2 + message[1]].decode("utf-8", "replace")
    try:
        name: str = service_pb2.ModelInferRequest.FromString(message).model_name
    except DecodeError:
        return ""
    return name


LOAD_METHOD = SERVICE + "RepositoryModelLoad"
_TARGET = re.compile(rb"/v2/repository/models/([A-Za-z0-9._~-]+)/load")
_PLAIN_BYTES = 1 << 16  # an error may quote it in a header
_STATUSES = {0: 200, 2: 400, 3: 400, 5: 404, 6: 400, 12: 501, 13: 500, 14: 503}  # Triton's
_HEADERS = ((b"content-type", b"application/json"),)


class _HttpLoadParameters(msgspec.Struct, forbid_unknown_fields=True):
    config: str


class _HttpLoadBody(msgspec.Struct, forbid_unknown_fields=True):
    parameters: _HttpLoadParameters | None = None


def load_over_grpc(call: HttpCall) -> GrpcCall | None:
    """The same load over gRPC; None for other calls, and for a load with more than a config."""
    found = _TARGET.fullmatch(call.target) if call.method == "POST" else None
    if found is None or len(call.body) > _PLAIN_BYTES:
        return None
    try:
        said = msgspec.json.decode(call.body, type=_HttpLoadBody) if call.body else _HttpLoadBody()
    except (msgspec.MsgspecError, ValueError):  # ValueError: invalid UTF-8
        return None
    question = service_pb2.RepositoryModelLoadRequest(model_name=found[1].decode())
    if said.parameters is not None:
        question.parameters["config"].string_param = said.parameters.config
    return GrpcCall(LOAD_METHOD, question.SerializeToString())


def to_http_answer(answer: GrpcAnswer) -> HttpAnswer:
    """The answer as Triton's HTTP port gives it. Raises EngineUnavailable if the call ended without one."""
    if answer.code not in _STATUSES:
        raise EngineUnavailable(f"the engine ended a model's load without an answer: {answer.details}")
    body = json.dumps({"error": answer.details}, ensure_ascii=False, separators=(",", ":")) if answer.code else ""
    return HttpAnswer(_STATUSES[answer.code], _HEADERS, body.encode())


def engine_sequence(client: str, sequence: int | str) -> int | str:
    """The engine's ID: an integer below 2^63, or 32 characters. 0 and "" mean no sequence and stay."""
    if not sequence:
        return sequence
    digest = hashlib.blake2b(repr((client, sequence)).encode(errors="backslashreplace"), digest_size=16).digest()
    if isinstance(sequence, str):
        return digest.hex()
    return int.from_bytes(digest[:8]) >> 1 or 1


async def with_engine_sequence(call: Call[A], head: InferHead, caller: Identity) -> Call[A]:
    """The inference with the engine's sequence ID, if it has one and the client has a key."""
    if head.sequence is None or not caller.key_name:
        return call
    return await in_thread(
        call.size_bytes, codec_of(call).with_sequence, call, engine_sequence(caller.owner, head.sequence)
    )
