"""A load that comes over HTTP is asked over gRPC where both say the same, and answered as HTTP would."""

import json

import pytest
from tritonclient.grpc import service_pb2

from server.backends.quiet_loads import LOAD, as_http, quiet_load
from server.core.errors import BackendUnavailable
from server.core.relay import GrpcAnswer, HttpAnswer, HttpCall

TARGET = b"/v2/repository/models/street/load"


def load(body: object = None, target: bytes = TARGET, method: str = "POST") -> HttpCall:
    """As a client sends it."""
    return HttpCall(method, target, (), b"" if body is None else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "config"), [(None, None), ({}, None), ({"parameters": {"config": '{"a": 1}'}}, '{"a": 1}')]
)
def test_plain_load_is_the_same_question_over_grpc(body: object, config: str | None) -> None:
    """With the configuration that comes with it, if any."""
    call = quiet_load(load(body))
    assert call is not None
    assert call.method == LOAD
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
    assert quiet_load(call) is None


@pytest.mark.parametrize(("code", "status"), [(3, 400), (5, 404), (13, 500), (14, 503), (2, 400)])
def test_refusal_is_told_in_http(code: int, status: int) -> None:
    """Triton's sentence as its HTTP port writes it."""
    headers = ((b"content-type", b"application/json"),)
    answer = as_http(GrpcAnswer(code, details='no "such" é\nAt:'))
    assert answer == HttpAnswer(status, headers, '{"error":"no \\"such\\" é\\nAt:"}'.encode())
    assert as_http(GrpcAnswer(0)) == HttpAnswer(200, headers, b"")


def test_load_that_ended_without_an_answer_is_no_fault_of_the_client() -> None:
    """Triton went: whoever asked may ask again."""
    with pytest.raises(BackendUnavailable, match="without an answer: gone"):
        as_http(GrpcAnswer(1, details="gone"))
