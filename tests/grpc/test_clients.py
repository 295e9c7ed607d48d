"""The unmodified tritonclient, synchronous and asyncio, talks to the front as it talks to Triton."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import tritonclient.grpc as sync_client
import tritonclient.grpc.aio as aio_client
from tritonclient.utils import InferenceServerException

from tests.grpc.harness import Front

X = np.array([[1.0, 2.5]], np.float32)


def inputs(client: object) -> list[object]:
    tensor = client.InferInput("x", [1, 2], "FP32")  # type: ignore[attr-defined]
    tensor.set_data_from_numpy(X)
    return [tensor]


async def test_aio_client_whole_round(front: Front) -> None:
    """Health, metadata, config, index, load, unload, inference."""
    client = aio_client.InferenceServerClient(front.address)
    try:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("double")
        assert (await client.get_server_metadata()).name == "fake"
        assert (await client.get_model_metadata("double")).inputs[0].name == "x"
        assert (await client.get_model_config("double")).config.max_batch_size == 8
        assert [row.name for row in (await client.get_model_repository_index()).models] == ["double", "texts"]
        await client.unload_model("texts")
        assert not await client.is_model_ready("texts")
        await client.load_model("texts")
        answer = await client.infer("double", inputs(aio_client), request_id="7", headers={"traceparent": "00-a-b-01"})
    finally:
        await client.close()

    np.testing.assert_array_equal(answer.as_numpy("y"), X * 2)
    assert answer.get_response().id == "7"
    _, head, call, _ = front.plane.relayed[-1]
    assert (head.model_name, head.request_id) == ("double", "7")
    assert ("traceparent", "00-a-b-01") in call.metadata


async def test_sync_client_infers_and_compresses(front: Front) -> None:
    """The blocking client, plain and with gzip."""

    def ask() -> list[object]:
        with sync_client.InferenceServerClient(front.address) as client:
            return [
                client.infer("double", inputs(sync_client), compression_algorithm=algorithm).as_numpy("y")
                for algorithm in (None, "gzip")
            ]

    for output in await asyncio.to_thread(ask):
        np.testing.assert_array_equal(output, X * 2)  # type: ignore[arg-type]


async def test_client_sees_the_engines_own_error(front: Front) -> None:
    """Status and text are what Triton would say."""
    client = aio_client.InferenceServerClient(front.address)
    try:
        with pytest.raises(InferenceServerException) as refused:
            await client.infer("nope", inputs(aio_client))
    finally:
        await client.close()

    assert refused.value.status() == "StatusCode.NOT_FOUND"
    assert refused.value.message() == "Request for unknown model: 'nope' is not found"


async def test_client_timeout_parameter_reaches_the_plane_as_deadline(front: Front) -> None:
    """The v2 parameter `timeout`, microseconds."""
    client = aio_client.InferenceServerClient(front.address)
    try:
        await client.infer("double", inputs(aio_client), timeout=2_000_000)
    finally:
        await client.close()

    _, head, _, deadline = front.plane.relayed[-1]
    assert head.timeout_us == 2_000_000
    assert deadline is not None


async def test_client_shared_memory_is_refused_with_a_sentence(front: Front) -> None:
    """What is off says so, and what to do instead."""
    client = aio_client.InferenceServerClient(front.address)
    try:
        with pytest.raises(InferenceServerException, match="start the gateway with --allow-client-shm"):
            await client.register_system_shared_memory("r", "/r", 8)
    finally:
        await client.close()


async def test_client_stream_yields_answers_in_order(front: Front) -> None:
    """tritonclient's own stream: three requests, three results by their ids."""
    client = aio_client.InferenceServerClient(front.address)

    async def requests() -> AsyncIterator[dict[str, object]]:
        for number in range(3):
            yield {"model_name": "double", "inputs": inputs(aio_client), "request_id": str(number)}

    try:
        results = [pair async for pair in client.stream_infer(requests())]
    finally:
        await client.close()

    assert [(result.get_response().id, error) for result, error in results] == [("0", None), ("1", None), ("2", None)]
