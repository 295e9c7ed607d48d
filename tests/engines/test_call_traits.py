"""What is read from a call before it goes to one replica, to another one, or to all."""

import pytest
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2

from penstock.engines import relayed_calls as call_traits
from penstock.protocol.call import GrpcCall, HttpCall

LONG_NAME = "m" * 300


def post(target: bytes, body: bytes = b"{}", *headers: tuple[bytes, bytes]) -> HttpCall:
    return HttpCall("POST", target, headers, body)


def infer_call(model: str, sequence: int | str = 0) -> GrpcCall:
    request = service_pb2.ModelInferRequest(model_name=model)
    if isinstance(sequence, str):
        request.parameters["sequence_id"].string_param = sequence
    elif sequence:
        request.parameters["sequence_id"].int64_param = sequence
    return GrpcCall(call_traits.INFER_METHOD, request.SerializeToString())


@pytest.mark.parametrize(
    ("call", "may"),
    [
        (HttpCall("GET", b"/v2/models/m/config", (), b""), True),
        (post(b"/v2/models/m/infer"), True),
        (post(b"/v2/models/m/versions/1/infer?x=1"), True),
        (post(b"/v2/repository/index"), True),
        (post(b"/v2/models/m/infer", b'{"parameters":{"sequence_id":7}}'), False),
        (post(b"/v2/models/m/infer", b"\x1f\x8b", (b"content-encoding", b"gzip")), False),
        (post(b"/v2/repository/models/m/load"), False),
        (post(b"/v2/logging"), False),
    ],
)
def test_http_call_may_be_sent_again_where_twice_is_no_more_than_once(call: HttpCall, may: bool) -> None:
    """Reads and inferences, but no step of a sequence, nor what may be one, nor a change of the engine."""
    assert call_traits.may_repeat(call) is may


def test_grpc_call_may_be_sent_again_where_twice_is_no_more_than_once() -> None:
    """The same rule over the other protocol."""
    assert call_traits.may_repeat(infer_call("m"))
    assert call_traits.may_repeat(GrpcCall(call_traits.SERVICE + "ModelReady", b""))
    for method in ("RepositoryModelLoad", "LogSettings", "SystemSharedMemoryRegister"):
        assert not call_traits.may_repeat(GrpcCall(call_traits.SERVICE + method, b""))
    assert not call_traits.may_repeat(infer_call("m", 7))


def test_what_changes_an_engine_goes_to_all_replicas() -> None:
    """Loads and settings; no inference, and no question that only reads."""
    assert call_traits.is_for_all_replicas(post(b"/v2/repository/models/m/unload"))
    assert call_traits.is_for_all_replicas(post(b"/v2/models/m/trace/setting"))
    assert not call_traits.is_for_all_replicas(post(b"/v2/models/load/infer"))
    assert not call_traits.is_for_all_replicas(HttpCall("GET", b"/v2/logging", (), b""))
    assert call_traits.is_for_all_replicas(GrpcCall(call_traits.SERVICE + "RepositoryModelLoad", b""))
    assert not call_traits.is_for_all_replicas(infer_call("m"))


@pytest.mark.parametrize("name", ["street", LONG_NAME, "größer", ""])
def test_model_is_read_from_path_and_message(name: str) -> None:
    """However long, in whatever letters; nothing where nothing is named."""
    assert call_traits.model_of(infer_call(name)) == name
    quoted = "".join(f"%{byte:02X}" for byte in name.encode()).encode()
    assert call_traits.model_of(post(b"/v2/models/" + quoted + b"/infer")) == name
    assert call_traits.model_of(post(b"/v2/repository/index")) == ""


def test_model_and_sequence_of_what_cannot_be_read_are_none() -> None:
    """The engine is the one that says what is wrong with it."""
    assert call_traits.model_of(GrpcCall(call_traits.INFER_METHOD, b"\xff\xff\xff")) == ""
    assert call_traits.sequence_of(GrpcCall(call_traits.INFER_METHOD, b"\xff\xff\xff")) == ""
    assert call_traits.sequence_of(post(b"/v2/models/m/infer", b"\xff{")) == ""


def test_sequence_is_read_from_both_protocols() -> None:
    """A number or a word; 0 is none. Of a binary request the JSON before the tensors."""
    assert [call_traits.sequence_of(infer_call("m", said)) for said in (7, "a", 0)] == ["7", "a", ""]
    body = b'{"parameters":{"sequence_id":7,"sequence_start":true},"inputs":[]}'
    assert call_traits.sequence_of(post(b"/v2/models/m/infer", body)) == "7"
    header = (b"inference-header-content-length", b"%d" % len(body))
    assert call_traits.sequence_of(post(b"/v2/models/m/infer", body + b"\x00\x01", header)) == "7"
    assert call_traits.sequence_of(post(b"/v2/models/m/infer", b'{"inputs":[]}')) == ""


@pytest.mark.parametrize(
    ("call", "model"),
    [
        (post(b"/v2/models/a%20b/versions/1/infer"), "a b"),
        (post(b"/v2/repository/models/a%20b/load?x=1"), "a b"),
        (post(b"/v2/repository/index"), ""),
        (HttpCall("GET", b"/v2", (), b""), ""),
    ],
)
def test_http_call_names_its_model(call: HttpCall, model: str) -> None:
    """The model's name is in the path, also for a load."""
    assert call_traits.named_by(call) == model


@pytest.mark.parametrize(
    ("method", "message", "model"),
    [
        ("ModelInfer", service_pb2.ModelInferRequest(model_name=LONG_NAME), LONG_NAME),
        ("ModelReady", service_pb2.ModelReadyRequest(name="m"), "m"),
        ("ModelMetadata", service_pb2.ModelMetadataRequest(name="m", version="1"), "m"),
        ("ModelConfig", service_pb2.ModelConfigRequest(name="m"), "m"),
        ("ModelStatistics", service_pb2.ModelStatisticsRequest(), ""),
        ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(repository_name="r", model_name="m"), "m"),
        ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="m"), "m"),
        ("RepositoryIndex", service_pb2.RepositoryIndexRequest(repository_name="r"), ""),
        ("LogSettings", service_pb2.LogSettingsRequest(), ""),
    ],
)
def test_grpc_call_names_its_model(method: str, message: Message, model: str) -> None:
    """Each kind of call about one model names it."""
    call = GrpcCall(call_traits.SERVICE + method, message.SerializeToString())
    assert call_traits.named_by(call) == model


@pytest.mark.parametrize("method", ["ModelInfer", "RepositoryModelLoad"])
def test_grpc_call_that_cannot_be_read_names_no_model(method: str) -> None:
    """The engine reports what is wrong with the call."""
    assert call_traits.named_by(GrpcCall(call_traits.SERVICE + method, b"\xff\xff")) == ""
