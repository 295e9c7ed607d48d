"""Deadlines that cannot be, words that would forge a header or a log line, and tensors by the thousand."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.integration.test_bad_input import grpc_infer, grpc_request, unharmed
from tests.support.http import call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import copy_identity

pytestmark = pytest.mark.xdist_group("stack")
INFER = "/v2/models/identity_fp32/infer"
ONE = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
FORGED = "forged-line level=error"
LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (debug|info|warning|error) |[EIW]\d{4} ")


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


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack that logs every refusal."""
    home = tmp_path_factory.mktemp("talking")
    copy_identity(home / "own")
    running = start_stack(home, "--model-repository", str(home / "own"), "--log-level", "debug")
    yield running
    stop_stack(running)


def raw(stack: RunningStack, request: bytes) -> bytes:
    parts = urlsplit(stack.http_url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


def test_words_of_a_client_forge_no_header_and_no_log_line(talking: RunningStack) -> None:
    """Line ends in paths, headers, names and ids come back escaped or not at all; each log line is one of ours."""
    broken = f"\r\n2026-01-01T00:00:00.000Z error   gateway: {FORGED}"
    escaped = "%0d%0a" + FORGED.replace(" ", "%20")
    for path in (f"/v2/models/a{escaped}/ready", f"/v2/{escaped}", f"/v2/repository/models/a{escaped}/load"):
        answer = call("POST" if path.endswith("load") else "GET", talking.http_url + path)
        assert answer.status in (400, 404), (path, answer)
        assert not any("forged" in f"{name}{value}" for name, value in answer.headers.items())
    odd = {"id": broken, "inputs": [{**ONE, "name": broken, "datatype": broken}], "outputs": [{"name": broken}]}
    assert post_json(talking.http_url + INFER, odd).status == 400
    assert post_json(talking.http_url + INFER, {"id": broken, "inputs": [{**ONE, "name": broken}]}).status == 400
    for head in (f"x-request-id: a\r{FORGED}", f"x-request-timeout-ms: 5\n {FORGED}", f"bad{broken}: 1"):
        answer_bytes = raw(
            talking, f"GET /v2 HTTP/1.1\r\nHost: localhost\r\n{head}\r\nConnection: close\r\n\r\n".encode()
        )
        assert FORGED.encode() not in answer_bytes.partition(b"\r\n\r\n")[0]
    for fields in ({"name": broken}, {"datatype": broken}):
        assert grpc_infer(talking, grpc_request(**fields))[0] is grpc.StatusCode.INVALID_ARGUMENT
    named = service_pb2.ModelInferRequest(model_name="a" + broken)
    assert grpc_infer(talking, named)[0] is grpc.StatusCode.INVALID_ARGUMENT
    talking.wait_for_log("request refused")
    assert [line for line in talking.log if not LINE.match(line)] == []
    assert not [line for line in talking.log if re.match(r"\S+ error +gateway: forged", line)]
