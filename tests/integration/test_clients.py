"""What a client sees of the gateway itself; unmodified clients and Triton's bytes: tests/contract."""

import json
import subprocess

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.http import call
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")
SUM = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6.5]}]}


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
