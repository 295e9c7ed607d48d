"""What a relayed call is as far as sending it matters: may it be sent again, to which model, to one replica or all."""

from urllib.parse import unquote

import msgspec
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from server.core.relay import GrpcCall, HttpCall

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
_ABOUT_ONE_MODEL = (  # whose requests begin with its name
    INFER_METHOD,
    *(SERVICE + name for name in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")),
)
INDEX_METHOD, INDEX_PATH = SERVICE + "RepositoryIndex", b"/v2/repository/index"


def may_repeat_http(call: HttpCall) -> bool:
    """Whether doing it twice does no more than doing it once: reads, and inferences that are no sequence's.

    A compressed body may hold a sequence.
    """
    if call.method in READS:
        return True
    if not _path(call).endswith(_REPEATABLE_POSTS) or _SEQUENCE in call.body:
        return False
    return not any(name == b"content-encoding" and value != b"identity" for name, value in call.headers)


def may_repeat_grpc(call: GrpcCall) -> bool:
    """The same over gRPC; shared memory is registered by its name, once."""
    if call.method == INFER_METHOD:
        return _SEQUENCE not in call.message
    return call.method not in _CHANGING_METHODS and not call.method.endswith("Register")


def changes_all_http(call: HttpCall) -> bool:
    """Whether every replica has to be told: models loaded, settings changed."""
    return call.method == "POST" and _path(call).endswith(_CHANGING_POSTS)


def changes_all_grpc(call: GrpcCall) -> bool:
    """The same over gRPC, where a question for settings is a change of none of them."""
    return call.method in _CHANGING_METHODS


def model_of_http(call: HttpCall) -> str:
    """The model in the call's path; empty where there is none."""
    path = _path(call)
    if not path.startswith(_MODELS):
        return ""
    return unquote(path.removeprefix(_MODELS).partition(b"/")[0].decode("latin-1"))


def model_of_grpc(call: GrpcCall) -> str:
    """The model that a call about one names; empty where it names none."""
    if call.method == INFER_METHOD:
        return _first_field(call.message)
    return ""


def named_by_http(call: HttpCall) -> str:
    """The model that the call names, also in a load or unload; empty if it names none."""
    path = _path(call)
    if not path.startswith(_REPOSITORY_MODELS):
        return model_of_http(call)
    return unquote(path.removeprefix(_REPOSITORY_MODELS).partition(b"/")[0].decode("latin-1"))


def named_by_grpc(call: GrpcCall) -> str:
    """The same over gRPC."""
    if call.method in _LOADS:
        try:
            loaded: str = service_pb2.RepositoryModelLoadRequest.FromString(call.message).model_name
        except DecodeError:
            return ""
        return loaded
    return _first_field(call.message) if call.method in _ABOUT_ONE_MODEL else ""


def sequence_of_http(call: HttpCall) -> str:
    """The sequence that an inference belongs to; empty for none, or where the body cannot be read."""
    length = next((value for name, value in call.headers if name == b"inference-header-content-length"), b"")
    body = call.body[: int(length)] if length.isdigit() else call.body
    try:
        return _said(msgspec.json.decode(body, type=_Sequenced).parameters.get("sequence_id"))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def sequence_of_grpc(call: GrpcCall) -> str:
    """The same over gRPC."""
    try:
        slot = service_pb2.ModelInferRequest.FromString(call.message).parameters.get("sequence_id")
    except DecodeError:
        return ""
    return "" if slot is None else _said(slot.string_param or slot.int64_param or slot.uint64_param)


class _Sequenced(msgspec.Struct):
    parameters: dict[str, object] = {}


def _said(sequence: object) -> str:
    """0 and an empty string are no sequence."""
    return str(sequence) if sequence and isinstance(sequence, int | str) else ""


def _path(call: HttpCall) -> bytes:
    return call.target.partition(b"?")[0]


def _first_field(message: bytes) -> str:
    """Field 1, a string, where the message begins with it, as every writer in use has it; else by protobuf."""
    if len(message) > 2 and message[0] == 0x0A and message[1] < 0x80:
        return message[2 : 2 + message[1]].decode("utf-8", "replace")
    try:
        name: str = service_pb2.ModelInferRequest.FromString(message).model_name
    except DecodeError:
        return ""
    return name
