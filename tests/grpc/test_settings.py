"""TraceSetting and LogSettings: one method reads and changes, and no client names a file."""

import itertools

import grpc
import pytest
from tritonclient.grpc import service_pb2

from penstock.protocol.call import GrpcAnswer, InferHead
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.grpc_codec import changes_settings, read_settings_model_name
from penstock.protocol.identity import Verb
from tests.grpc.harness import Front


def trace_request(model_name: str = "", **settings: list[str]) -> bytes:
    """A TraceSettingRequest, serialised."""
    request = service_pb2.TraceSettingRequest(model_name=model_name)
    for name, values in settings.items():
        request.settings[name].value.extend(values)
    message: bytes = request.SerializeToString()
    return message


def log_request(**settings: str | bool) -> bytes:
    """A LogSettingsRequest, serialised."""
    request = service_pb2.LogSettingsRequest()
    for name, value in settings.items():
        setattr(request.settings[name], "bool_param" if isinstance(value, bool) else "string_param", value)
    message: bytes = request.SerializeToString()
    return message


CALLS = [
    ("TraceSetting", trace_request(), Verb.READ, ""),
    ("TraceSetting", trace_request("double"), Verb.READ, "double"),
    ("TraceSetting", trace_request("double", trace_rate=["5"]), Verb.CONFIGURE, "double"),
    ("TraceSetting", trace_request(trace_rate=[]), Verb.CONFIGURE, ""),
    ("LogSettings", log_request(), Verb.READ, ""),
    ("LogSettings", log_request(log_info=True), Verb.CONFIGURE, ""),
]


@pytest.mark.parametrize(("method", "message", "verb", "model"), CALLS, ids=itertools.count())
async def test_settings_reach_the_engine_as_what_they_are(
    front: Front, method: str, message: bytes, verb: Verb, model: str
) -> None:
    """A message without a setting reads, any other changes: clearing one too. Bytes pass untouched."""
    front.plane.answer = GrpcAnswer(0, b"settings")
    assert await front.call(method, message) == b"settings"
    asked, head, call, _ = front.plane.relayed[0]
    assert (asked, head, call.message) == (verb, InferHead(model), message)


@pytest.mark.parametrize(
    ("method", "message", "word"),
    [
        ("TraceSetting", trace_request(trace_file=["/tmp/x"]), "trace"),
        ("TraceSetting", trace_request(trace_rate=["1"], trace_file=[]), "trace"),
        ("LogSettings", log_request(log_file="/tmp/x", log_info=True), "log"),
    ],
    ids=["trace", "cleared trace", "log"],  # maps are serialised in no order
)
async def test_settings_that_name_a_file_are_refused_here(front: Front, method: str, message: bytes, word: str) -> None:
    """UNIMPLEMENTED in Triton's own words; an older Triton would write it wherever a client says."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.call(method, message)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert refused.value.details() == f"{word} file location can not be updated through network protocol"
    assert front.plane.relayed == []


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05ab", b"\x0a\x04\x0a\x02\xff\xfe"])
async def test_settings_that_are_no_message_are_refused_here(front: Front, message: bytes) -> None:
    """INVALID_ARGUMENT, and nothing else comes of them."""
    changes_settings(message)
    with pytest.raises(InvalidRequest):
        read_settings_model_name(message)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.call("LogSettings", message)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert front.plane.relayed == []
