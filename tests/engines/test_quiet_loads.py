"""A load that comes over HTTP is asked over gRPC where both say the same, and answered as HTTP would."""

import json

import pytest
from tritonclient.grpc import service_pb2

from penstock.engines.relayed_calls import LOAD_METHOD, load_over_grpc, to_http_answer
from penstock.protocol.call import GrpcAnswer, HttpAnswer, HttpCall
from penstock.protocol.errors import EngineUnavailable

TARGET = b"/v2/repository/models/street/load"


def load(body: object = None, target: bytes = TARGET, method: str = "POST") -> HttpCall:
    """As a client sends it."""
    return HttpCall(method, target, (), b"" if body is None else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "config"), [(None, None), ({}, None), ({"parameters": {"config": '{"a": 1}'}}, '{"a": 1}')]
)
def test_plain_load_is_the_same_question_over_grpc(body: object, config: str | None) -> None:
    """With the configuration that comes with it, if any."""
    call = load_over_grpc(load(body))
    assert call is not None
    assert call.method == LOAD_METHOD
    asked = service_pb2.RepositoryModelLoadRequest.FromString(call.message)
    assert asked.model_name == "street"
    said = {key: value.string_param for key, value in asked.parameters.items()}
    assert said == ({} if config is None else {"config": config})


@pytest.mark.parametrize(
    "call",
    [
        load(target=b"/v2/repository/models/street/unload"),
        load(target=b"/v2/repository/models/a%20b/load"),
        load(target=b"/v2/repository/any/models/street/load"),
        load(target=b"/v2/repository/models/street/load?x=1"),
        load(method="GET"),
        load({"parameters": {"config": "{}", "file:1/model.onnx": "AAAA"}}),
        load({"parameters": {"config": 7}}),
        load({"parameters": {"unload_dependents": True}}),
        load({"parameters": {}}),
        load([]),
        load({"parameters": {"config": "x" * 300_000}}),
        HttpCall("POST", TARGET, (), b"{"),
        HttpCall("POST", TARGET, (), b"\xff"),
        HttpCall("POST", TARGET, (), b'{"parameters":{"config":"\xff"}}'),
    ],
)
def test_anything_else_goes_over_http_as_it_came(call: HttpCall) -> None:
    """Triton has words of its own for each."""
    assert load_over_grpc(call) is None


@pytest.mark.parametrize(("code", "status"), [(3, 400), (5, 404), (13, 500), (14, 503), (2, 400)])
def test_refusal_is_converted_to_http(code: int, status: int) -> None:
    """Triton's sentence as its HTTP port writes it."""
    headers = ((b"content-type", b"application/json"),)
    answer = to_http_answer(GrpcAnswer(code, details='no "such" é\nAt:'))
    assert answer == HttpAnswer(status, headers, '{"error":"no \\"such\\" é\\nAt:"}'.encode())
    assert to_http_answer(GrpcAnswer(0)) == HttpAnswer(200, headers, b"")


def test_load_that_ended_without_an_answer_is_no_fault_of_the_client() -> None:
    """Triton went: the client may retry."""
    with pytest.raises(EngineUnavailable, match="without an answer: gone"):
        to_http_answer(GrpcAnswer(1, details="gone"))
