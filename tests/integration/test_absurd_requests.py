"""Deadlines that cannot be, and tensors by the thousand."""

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.integration.test_bad_input import grpc_infer, grpc_request, unharmed
from tests.support.http import post_json
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")
INFER = "/v2/models/identity_fp32/infer"
ONE = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}


@pytest.mark.parametrize(
    ("timeout", "status"),
    [("0", 504), ("-0.5", 504), ("-" + "9" * 400, 504), ("9" * 400, 200), ("1e3", 400), ("nan", 400), ("", 400)],
    ids=["zero", "negative", "very negative", "for ever", "exponent", "nan", "empty"],
)
def test_absurd_deadline_of_a_header_is_refused_at_once_or_clamped(
    stack: RunningStack, timeout: str, status: int
) -> None:
    """Past is 504 without the engine, no number is 400, and a thousand years are as long as may be."""
    with unharmed(stack):
        answer = post_json(stack.http_url + INFER, {"inputs": [ONE]}, **{"x-request-timeout-ms": timeout})
        assert answer.status == status, answer.body


@pytest.mark.parametrize(
    ("timeout_us", "code"),
    [(-1, grpc.StatusCode.DEADLINE_EXCEEDED), (-(2**63), grpc.StatusCode.DEADLINE_EXCEEDED), (2**63 - 1, None)],
    ids=["negative", "least", "for ever"],
)
def test_absurd_deadline_of_a_parameter_is_refused_at_once_or_clamped(
    stack: RunningStack, timeout_us: int, code: grpc.StatusCode | None
) -> None:
    """The same over gRPC, where a parameter is an int64."""
    request = grpc_request()
    request.parameters["timeout"].int64_param = timeout_us
    with unharmed(stack):
        if code is not None:
            assert grpc_infer(stack, request)[0] is code
            return
        with grpc.insecure_channel(stack.grpc_address) as channel:
            method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            answer = method(request.SerializeToString(), timeout=20)
        assert service_pb2.ModelInferResponse.FromString(answer).outputs[0].name == "y"


@pytest.mark.parametrize(
    ("names", "said"),
    [(["y", "y"], "twice"), (["y", "nothing"], "nothing"), ([f"o{number}" for number in range(10_000)], "10000")],
    ids=["doubled", "unknown", "10,000"],
)
def test_outputs_that_cannot_be_are_refused_over_both_protocols(
    stack: RunningStack, names: list[str], said: str
) -> None:
    """400 and INVALID_ARGUMENT, and the text says what it is."""
    request = grpc_request()
    for name in names:
        request.outputs.add(name=name)
    with unharmed(stack):
        answer = post_json(stack.http_url + INFER, {"inputs": [ONE], "outputs": [{"name": name} for name in names]})
        assert answer.status == 400
        assert said in answer.json["error"]
        code, details = grpc_infer(stack, request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert said in details
