"""Unmodified clients talk to the gateway, and what is not ours is Triton's to the byte."""

import asyncio
import json
import subprocess
import time

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.http import call, post_json
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}
SUM = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6.5]}]}


def test_http_client_infers_with_binary_and_json_tensors(stack: RunningStack) -> None:
    """tritonclient.http, both encodings in and out."""
    client = tritonclient.http.InferenceServerClient(stack.http_url.removeprefix("http://"))
    array = np.arange(16, dtype=np.float32).reshape(2, 8)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity_fp32")
    for is_binary in (True, False):
        tensor = tritonclient.http.InferInput("x", [2, 8], "FP32")
        tensor.set_data_from_numpy(array, binary_data=is_binary)
        wanted = tritonclient.http.InferRequestedOutput("y", binary_data=is_binary)
        np.testing.assert_array_equal(client.infer("identity_fp32", [tensor], outputs=[wanted]).as_numpy("y"), array)
    client.close()


def test_http_client_compression_both_ways_is_understood(stack: RunningStack) -> None:
    """Request bodies in gzip and deflate, and compressed answers where they are asked for."""
    client = tritonclient.http.InferenceServerClient(stack.http_url.removeprefix("http://"))
    array = np.arange(64, dtype=np.float32).reshape(1, 64)
    tensor = tritonclient.http.InferInput("x", [1, 64], "FP32")
    tensor.set_data_from_numpy(array)
    for way in ("gzip", "deflate"):
        result = client.infer(
            "identity_fp32", [tensor], request_compression_algorithm=way, response_compression_algorithm=way
        )
        np.testing.assert_array_equal(result.as_numpy("y"), array)
    client.close()


def test_http_client_sends_and_gets_bytes(stack: RunningStack) -> None:
    """BYTES tensors of any content come back as they went."""
    client = tritonclient.http.InferenceServerClient(stack.http_url.removeprefix("http://"))
    array = np.array([[b"", b"caf\xc3\xa9", b"\x00\xff", b"x" * 300]], dtype=np.object_)
    tensor = tritonclient.http.InferInput("x", [1, 4], "BYTES")
    tensor.set_data_from_numpy(array)
    assert client.infer("identity_bytes", [tensor]).as_numpy("y").tolist() == array.tolist()
    client.close()


async def test_aio_clients_infer_side_by_side(stack: RunningStack) -> None:
    """tritonclient.http.aio and tritonclient.grpc.aio, several requests at once."""
    array = np.arange(4, dtype=np.float32).reshape(1, 4)
    http_client = tritonclient.http.aio.InferenceServerClient(stack.http_url.removeprefix("http://"))
    grpc_client = tritonclient.grpc.aio.InferenceServerClient(stack.grpc_address)
    try:
        for module, client in ((tritonclient.http, http_client), (tritonclient.grpc, grpc_client)):
            tensor = module.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(array)
            results = await asyncio.gather(*(client.infer("identity_fp32", [tensor]) for _ in range(8)))
            for result in results:
                np.testing.assert_array_equal(result.as_numpy("y"), array)
    finally:
        await http_client.close()
        await grpc_client.close()


def test_grpc_client_reads_metadata_config_statistics_and_index(stack: RunningStack) -> None:
    """The control calls of tritonclient.grpc answer as Triton does."""
    client = tritonclient.grpc.InferenceServerClient(stack.grpc_address)
    direct = tritonclient.grpc.InferenceServerClient(stack.engine_grpc_address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity_fp32")
    assert client.get_model_metadata("people") == direct.get_model_metadata("people")
    assert client.get_model_config("people") == direct.get_model_config("people")
    index = {row.name: row.state for row in client.get_model_repository_index().models}
    assert index["people"] == "READY"
    assert index["broken"] != "READY"
    statistics = client.get_inference_statistics("identity_fp32").model_stats[0]
    assert statistics.name == "identity_fp32"
    client.close()
    direct.close()


def test_load_and_unload_through_both_protocols(stack: RunningStack) -> None:
    """A model that was unloaded over REST and loaded over gRPC serves again."""
    http_client = tritonclient.http.InferenceServerClient(stack.http_url.removeprefix("http://"))
    grpc_client = tritonclient.grpc.InferenceServerClient(stack.grpc_address)
    http_client.unload_model("slow")
    until = time.monotonic() + 10
    while http_client.is_model_ready("slow"):
        assert time.monotonic() < until, "the model is not unloaded within 10 s"
        time.sleep(0.02)
    grpc_client.load_model("slow")
    assert http_client.is_model_ready("slow")
    with pytest.raises(InferenceServerException, match="broken on purpose"):
        http_client.load_model("broken")
    http_client.close()
    grpc_client.close()


@pytest.mark.parametrize(
    ("method", "path", "payload"),
    [
        ("GET", "/v2/models/identity_fp32", None),
        ("GET", "/v2/models/identity_fp32/versions/1", None),
        ("GET", "/v2/models/identity_fp32/config", None),
        ("GET", "/v2/models/people/config", None),
        ("GET", "/v2/models/identity_fp32/ready", None),
        ("GET", "/v2/models/missing", None),
        ("GET", "/v2/models/missing/config", None),
        ("GET", "/v2/models/identity_fp32/versions/7/ready", None),
        ("POST", "/v2/repository/index", {}),
        ("POST", "/v2/models/identity_fp32/infer", {"id": "7", **SUM}),
        ("POST", "/v2/models/identity_fp32/versions/1/infer", SUM),
        ("POST", "/v2/models/missing/infer", SUM),
        ("POST", "/v2/models/identity_fp32/infer", {**SUM, "outputs": [{"name": "nothing"}]}),
        ("POST", "/v2/models/identity_fp32/infer", {"inputs": [{**SUM["inputs"][0], "name": "wrong"}]}),
        (
            "POST",
            "/v2/models/identity_fp32/infer",
            {"inputs": [{**SUM["inputs"][0], "datatype": "INT8", "data": [1] * 6}]},
        ),
        ("POST", "/v2/models/identity_fp32/infer", {"inputs": [{**SUM["inputs"][0], "shape": [6]}]}),
    ],
)
def test_rest_answers_are_tritons_to_the_byte(
    stack: RunningStack, method: str, path: str, payload: dict[str, object] | None
) -> None:
    """Status, body and headers of the gateway and of the bare Triton are the same."""
    body = json.dumps(payload).encode() if payload is not None else None
    through = call(method, stack.http_url + path, body)
    direct = call(method, stack.engine_http_url + path, body)
    assert (through.status, through.body) == (direct.status, direct.body)
    ours = {name: value for name, value in through.headers.items() if name not in HOP_BY_HOP}
    theirs = {name: value for name, value in direct.headers.items() if name not in HOP_BY_HOP}
    assert ours == theirs


def test_rest_binary_answer_is_tritons_to_the_byte(stack: RunningStack) -> None:
    """The binary tensor extension: header length and raw bytes pass untouched."""
    array = np.arange(8, dtype=np.float32)
    head = {
        "inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "parameters": {"binary_data_size": 32}}],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    headers = {"inference-header-content-length": str(len(text)), "content-type": "application/octet-stream"}
    path = "/v2/models/identity_fp32/infer"
    through = call("POST", stack.http_url + path, text + array.tobytes(), headers)
    direct = call("POST", stack.engine_http_url + path, text + array.tobytes(), headers)
    assert through.status == 200
    assert through.body == direct.body
    assert through.body.endswith(array.tobytes())
    assert through.headers["inference-header-content-length"] == direct.headers["inference-header-content-length"]
    assert through.headers["content-type"] == direct.headers["content-type"]


def test_grpc_answers_are_tritons_to_the_byte(stack: RunningStack) -> None:
    """Messages, codes and error texts of both, as raw bytes."""
    good = service_pb2.ModelInferRequest(model_name="identity_fp32", id="9")
    good.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    good.raw_input_contents.append(np.array([1, 2], np.float32).tobytes())
    wrong = service_pb2.ModelInferRequest()
    wrong.CopyFrom(good)
    wrong.inputs[0].name = "wrong"
    unknown = service_pb2.ModelInferRequest()
    unknown.CopyFrom(good)
    unknown.model_name = "missing"
    for request in (good, wrong, unknown):
        assert _raw(stack.grpc_address, request) == _raw(stack.engine_grpc_address, request)


def _raw(address: str, request: service_pb2.ModelInferRequest) -> tuple[str, bytes]:
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        try:
            return "OK", method(request.SerializeToString(), timeout=20)
        except grpc.RpcError as error:
            return error.code().name, error.details().encode()


def test_health_of_the_gateway_is_json(stack: RunningStack) -> None:
    """Live and ready answer 200 with a body that KServe's client can read."""
    assert call("GET", f"{stack.http_url}/v2/health/live").json == {"live": True}
    assert call("GET", f"{stack.http_url}/v2/health/ready").json == {"ready": True}


def test_server_metadata_does_not_advertise_what_is_blocked(stack: RunningStack) -> None:
    """Extensions that the gateway refuses are not in the list, over both protocols; and they are refused with 501."""
    blocked = {"system_shared_memory", "cuda_shared_memory"}
    metadata = call("GET", f"{stack.http_url}/v2").json
    assert metadata["name"] == "triton"
    assert blocked.isdisjoint(metadata["extensions"])
    assert "binary_tensor_data" in metadata["extensions"]
    with grpc.insecure_channel(stack.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert list(stub.ServerMetadata(service_pb2.ServerMetadataRequest()).extensions) == metadata["extensions"]
        with pytest.raises(grpc.RpcError) as refusal:
            stub.SystemSharedMemoryStatus(service_pb2.SystemSharedMemoryStatusRequest())
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert call("GET", f"{stack.http_url}/v2/systemsharedmemory/status").status == 501


def test_curl_posts_json_as_a_user_would(stack: RunningStack) -> None:
    """curl, unmodified, with a JSON tensor."""
    command = ["curl", "-s", "-d", json.dumps(SUM), f"{stack.http_url}/v2/models/identity_fp32/infer"]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert answer["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.5]


def test_deadline_by_header_and_parameter_and_grpc_is_kept(stack: RunningStack) -> None:
    """A model that sleeps 600 ms, asked to answer within 100 ms: 504 or DEADLINE_EXCEEDED, not 600 ms later."""
    sleepy = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [600]}]}
    url = f"{stack.http_url}/v2/models/slow/infer"
    assert post_json(url, sleepy, **{"x-request-timeout-ms": "100"}).status == 504
    assert post_json(url, {**sleepy, "parameters": {"timeout": 100_000}}).status == 504
    client = tritonclient.grpc.InferenceServerClient(stack.grpc_address)
    tensor = tritonclient.grpc.InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.array([600], np.float32))
    with pytest.raises(InferenceServerException, match=r"Deadline Exceeded|did not answer within"):
        client.infer("slow", [tensor], client_timeout=0.1)
    client.close()
