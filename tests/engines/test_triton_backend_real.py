"""TritonBackend against the real Triton with tiny python models."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from penstock.engines.triton.client import TritonEngine
from penstock.engines.triton.runtime import find_triton
from penstock.protocol.call import GrpcCall, HttpCall
from penstock.protocol.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ModelNotReady
from penstock.protocol.grpc_inference import encode_response
from penstock.protocol.grpc_messages import encode_request
from penstock.protocol.inference import Array, InferRequest, tensor_from_bytes, tensor_from_numpy
from tests.engines.triton_of_onnx_models import RunningTriton, running_triton
from tests.support.tiny_models import copy_identity, write_tiny_repository


@pytest.fixture(scope="module")
def triton(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    models, folder = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("triton")
    write_tiny_repository(models)
    copy_identity(models)
    launch = find_triton(environment=triton_environment, search_path="").prepare(folder)
    with running_triton(launch, models, folder) as running:
        yield running


@pytest_asyncio.fixture
async def backend(triton: RunningTriton) -> AsyncIterator[TritonEngine]:
    async with TritonEngine(
        http_url=triton.http_url,
        grpc_address=triton.grpc_address,
        metrics_url=f"{triton.metrics_url}/metrics",
        max_connections=4,
    ) as engine:
        yield engine


def request(model_name: str, array: Array, deadline: float | None = None) -> InferRequest:
    return InferRequest(model_name, (tensor_from_numpy("x", array),), deadline=deadline)


async def test_infer_real_tensors_come_back_unchanged(backend: TritonEngine) -> None:
    """Floats and byte strings survive the round trip, and are not empty."""
    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    texts = tensor_from_bytes("x", [b"", b"\x00\xff", b"text"], (1, 3))

    echoed = await backend.infer(request("identity_fp32", floats))
    echoed_texts = await backend.infer(InferRequest("identity_bytes", (texts,)))

    np.testing.assert_array_equal(echoed.outputs[0].to_numpy(), floats)
    assert echoed_texts.outputs[0].to_numpy().tolist() == [[b"", b"\x00\xff", b"text"]]


async def test_relay_real_answers_are_tritons_own(backend: TritonEngine) -> None:
    """The same inference through both relays and through the Backend gives the same numbers."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}]}
    call = HttpCall("POST", b"/v2/models/identity_fp32/infer", (), json.dumps(body).encode())

    over_http = await backend.send(call, deadline=None)
    ours = await backend.infer(request("identity_fp32", np.array([[1.5, 2.0]], np.float32)))

    assert json.loads(over_http.body)["outputs"][0]["data"] == [1.5, 2.0]
    assert ours.outputs[0].to_numpy().tolist() == [[1.5, 2.0]]


async def test_relay_real_grpc_message_is_tritons_own(backend: TritonEngine) -> None:
    """The relayed ModelInferResponse, byte for byte, is what its tensors encode to."""
    asked = request("identity_fp32", np.array([[1.5, 2.0]], np.float32))

    relayed = await backend.send(
        GrpcCall("/inference.GRPCInferenceService/ModelInfer", encode_request(asked)), deadline=None
    )

    assert relayed.code == 0
    assert relayed.message == encode_response(await backend.infer(asked))


async def test_infer_real_refusals_are_ours(backend: TritonEngine) -> None:
    """Unknown models, wrong shapes and late answers of the real engine."""
    row = np.zeros((1, 1), np.float32)
    with pytest.raises(ModelNotFound):
        await backend.infer(request("nope", row))
    with pytest.raises(InvalidRequest, match="batch-size must be <= 8"):
        await backend.infer(request("identity_fp32", np.zeros((9, 1), np.float32)))
    deadline = time.monotonic() + 0.2
    with pytest.raises(DeadlineExceeded):
        await backend.infer(request("slow", np.full((1,), 600, np.float32), deadline))
    assert abs(time.monotonic() - deadline) < 0.05


async def test_control_real_engine_tells_its_models(backend: TritonEngine) -> None:
    """Ready although one model is broken; the index says why it is; its config and metrics arrive."""
    index = {row.name: row for row in await backend.repository_index()}
    config = await backend.model_config("identity_bytes")

    assert await backend.ready()
    assert await backend.ready("identity_fp32")
    assert not await backend.ready("broken")
    assert "this model is broken on purpose" in index["broken"].reason
    assert (config.backend, config.max_batch_size) == ("python", 8)
    assert b"nv_inference_request_success" in await backend.metrics()


async def test_load_real_failure_and_reload(backend: TritonEngine) -> None:
    """A broken model's reason is the model's own; a good one goes and comes back."""
    with pytest.raises(ModelNotReady, match=r"'broken' cannot be loaded: .*this model is broken on purpose"):
        await backend.load("broken")
    with pytest.raises(ModelNotReady, match="not in the engine's model repository"):
        await backend.load("nope")

    await backend.unload("identity_bytes")
    async with asyncio.timeout(30):
        while await backend.ready("identity_bytes"):
            await asyncio.sleep(0.02)
    await backend.load("identity_bytes")
    assert await backend.ready("identity_bytes")
