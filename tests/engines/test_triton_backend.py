"""TritonBackend: our requests become Triton's, its answers and failures become ours. Over real gRPC."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from penstock.engines.call_options import CallTimeouts
from penstock.engines.triton.client import TritonEngine
from penstock.protocol.engine import ModelState, TensorSpec
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
)
from penstock.protocol.grpc_messages import encode_request
from penstock.protocol.inference import Datatype, InferRequest, Parameter, SlabAddress, Tensor, tensor_from_numpy
from tests.engines.fake_triton import FakeTriton, Mode

X = np.array([[1.0, 2.5]], np.float32)


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeTriton]:
    async with FakeTriton().running() as triton:
        yield triton


@pytest_asyncio.fixture
async def backend(fake: FakeTriton) -> AsyncIterator[TritonEngine]:
    async with TritonEngine(http_url=fake.http_url, grpc_address=fake.grpc_address, max_connections=4) as engine:
        yield engine


def request(model_name: str = "double", **fields: object) -> InferRequest:
    return InferRequest(model_name, (tensor_from_numpy("x", X),), **fields)  # type: ignore[arg-type]


async def test_infer_round_trip_gives_the_engines_tensors(backend: TritonEngine) -> None:
    """Values, names, types, ids and versions come back, with the time that it took."""
    response = await backend.infer(request(id="7", outputs=("y",)))

    output = response.outputs[0]
    assert (response.model_name, response.model_version, response.id) == ("double", "1", "7")
    assert (output.name, output.datatype, output.shape) == ("y", Datatype.FP32, (1, 2))
    np.testing.assert_array_equal(output.to_numpy(), X * 2)
    assert response.timings.infer > 0


async def test_infer_parameters_survive_both_ways(backend: TritonEngine) -> None:
    """Booleans, integers, floats and texts keep their kind."""
    parameters: dict[str, Parameter] = {"a": True, "b": -3, "c": 2.5, "d": "word", "e": 2**64 - 1}

    response = await backend.infer(request(parameters=parameters))

    assert dict(response.parameters) == parameters
    assert isinstance(response.parameters["a"], bool)


async def test_infer_parameter_too_large_is_refused(backend: TritonEngine) -> None:
    """A number that no 64-bit field holds never leaves."""
    with pytest.raises(InvalidRequest, match="parameter 'n'"):
        await backend.infer(request(parameters={"n": 2**64}))


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (Mode.GARBAGE, "no ModelInferResponse"),
        (Mode.WRONG_SHAPE, r"output 'y' is FP32 of shape \[7, 7\] but came with 8 bytes"),
        (Mode.EMPTY, r"output 'y' is FP32 of shape \[1, 2\] but came with 0 bytes"),
        (Mode.NO_CONTENT, "announced 1 outputs and sent 0"),
        (Mode.OTHER_OUTPUT, r"left out the requested outputs \['y'\]"),
        (Mode.UNKNOWN_DATATYPE, "unknown datatype 'FP128'"),
    ],
)
async def test_infer_answer_that_breaks_the_contract_is_the_engines_failure(
    backend: TritonEngine, fake: FakeTriton, mode: Mode, words: str
) -> None:
    """Whatever does not hold what was asked is refused, with the model named."""
    fake.mode = mode

    with pytest.raises(EngineFailed, match=words) as failed:
        await backend.infer(request(outputs=("y",)))

    assert "'double'" in failed.value.message


async def test_infer_nan_arrives_as_nan(backend: TritonEngine, fake: FakeTriton) -> None:
    """Values are the caller's to judge: the backend passes them."""
    fake.mode = Mode.NAN

    response = await backend.infer(request())

    assert all(math.isnan(value) for value in response.outputs[0].to_numpy().ravel())


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        (Mode.ERROR, EngineFailed, "model 'double' failed: .*ValueError: boom$"),
        (Mode.QUEUE_FULL, Overloaded, "queue is full"),
        (Mode.LATE_IN_QUEUE, DeadlineExceeded, "Request timeout expired"),
        (Mode.LOADING, ModelNotReady, "not at ready state"),
        (Mode.GAVE_UP, EngineUnavailable, "the engine gave up"),
    ],
)
async def test_infer_engine_error_becomes_ours(
    backend: TritonEngine, fake: FakeTriton, mode: Mode, kind: type[InferenceError], words: str
) -> None:
    """One class a meaning, the engine's words on one line, never its traceback."""
    fake.mode = mode

    with pytest.raises(kind, match=words) as failed:
        await backend.infer(request())

    assert type(failed.value) is kind
    assert "model.py" not in failed.value.message
    assert "\n" not in failed.value.message


async def test_infer_unknown_model_is_not_found(backend: TritonEngine) -> None:
    """The engine's NOT_FOUND is ours."""
    with pytest.raises(ModelNotFound, match="unknown model: 'nope'"):
        await backend.infer(request("nope"))


async def test_infer_past_deadline_never_leaves(backend: TritonEngine, fake: FakeTriton) -> None:
    """What is late already costs the engine nothing."""
    with pytest.raises(DeadlineExceeded):
        await backend.infer(request(deadline=time.monotonic() - 1))

    assert fake.grpc_methods == []


async def test_infer_without_a_listener_is_unavailable_at_once() -> None:
    """A refused connection is an answer, not a wait."""
    patient = CallTimeouts(connect_s=60.0)
    async with TritonEngine(
        http_url="http://127.0.0.1:9", grpc_address="127.0.0.1:9", max_connections=1, timeouts=patient
    ) as backend:
        started = time.monotonic()
        with pytest.raises(EngineUnavailable, match=r"no connection to the engine at 127\.0\.0\.1:9"):
            await backend.infer(request())

        assert time.monotonic() - started < 10
        assert await backend.ready() is False


async def test_control_call_hung_engine_is_unavailable_in_its_time(fake: FakeTriton) -> None:
    """A call without a deadline ends all the same; late is as good as down."""
    fake.mode = Mode.SLOW
    timeouts = CallTimeouts(control_s=0.2)
    async with TritonEngine(
        http_url=fake.http_url, grpc_address=fake.grpc_address, max_connections=1, timeouts=timeouts
    ) as backend:
        started = time.monotonic()

        assert await backend.ready() is False
        assert 0.15 < time.monotonic() - started < 5


async def test_metadata_and_config_are_ours(backend: TritonEngine) -> None:
    """The engine's messages become the nouns; an unknown model is not found."""
    metadata = await backend.model_metadata("double")
    config = await backend.model_config("double")

    assert (metadata.name, metadata.versions, metadata.platform) == ("double", ("1",), "python")
    assert metadata.inputs == (TensorSpec("x", Datatype.FP32, (-1, -1)),)
    assert (config.name, config.max_batch_size, dict(config.parameters)) == ("double", 8, {"network-type": "0"})
    with pytest.raises(ModelNotFound):
        await backend.model_config("nope")


async def test_ready_asks_for_the_engine_or_one_model(backend: TritonEngine) -> None:
    """One broken model does not make the engine unready."""
    assert await backend.ready()
    assert await backend.ready("double")
    assert not await backend.ready("broken")


async def test_repository_index_reasons_are_one_line(backend: TritonEngine) -> None:
    """Rows as the engine has them, without its tracebacks."""
    assert await backend.repository_index() == [
        ModelState("double", "1", "READY", ""),
        ModelState("broken", "1", "UNAVAILABLE", "Internal: boom"),
        ModelState("unloaded", "", "", ""),
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken", "model 'broken' cannot be loaded: version 1: Internal: RuntimeError: no weights second line"),
        ("nope", "model 'nope' cannot be loaded: it is not in the engine's model repository, or its config.pbtxt"),
    ],
)
async def test_load_failure_says_why_in_one_line(backend: TritonEngine, name: str, sentence: str) -> None:
    """The reason that an operator needs, and nothing else."""
    with pytest.raises(ModelNotReady) as refused:
        await backend.load(name)

    assert refused.value.message.startswith(sentence)
    assert "\n" not in refused.value.message


async def test_load_and_unload_pass(backend: TritonEngine, fake: FakeTriton) -> None:
    """Both reach the engine."""
    await backend.load("double")
    await backend.unload("double")

    assert fake.grpc_methods == ["RepositoryModelLoad", "RepositoryModelUnload"]


async def test_metrics_are_the_engines_page_or_empty(fake: FakeTriton) -> None:
    """The page's bytes; nothing, not an error, where it fails or is not there."""
    addresses = {"http_url": fake.http_url, "grpc_address": fake.grpc_address}
    async with (
        TritonEngine(**addresses, max_connections=1, metrics_url=f"{fake.http_url}/metrics") as with_page,
        TritonEngine(**addresses, max_connections=1) as without_page,
        TritonEngine(**addresses, max_connections=1, metrics_url="http://127.0.0.1:9/metrics") as with_dead_page,
    ):
        assert await with_page.metrics() == b'{"outputs": []}'
        assert fake.http_requests[0].startswith(b"GET /metrics HTTP/1.1\r\n")
        assert await without_page.metrics() == b""
        assert await with_dead_page.metrics() == b""
        fake.mode = Mode.ERROR
        assert await with_page.metrics() == b""


@pytest.mark.parametrize("url", ["localhost:9000", "ftp://host", "http://"])
async def test_backend_address_that_is_none_is_refused(url: str) -> None:
    """The message shows what an address looks like."""
    with pytest.raises(InvalidRequest, match="http://host:8000"):
        TritonEngine(http_url=url, grpc_address="127.0.0.1:1", max_connections=1)


def test_encode_leaves_out_what_the_engine_reads_itself() -> None:
    """An input in a region that the engine knows is named by region, size and offset; every other one is sent."""
    known, unknown, first = (
        replace(tensor_from_numpy(name, X), place=SlabAddress(region, 1, offset))
        for name, region, offset in (("a", "r", 64), ("b", "another", 64), ("c", "r", 0))
    )
    asked = InferRequest("double", (known, unknown, first, tensor_from_numpy("d", X)))
    message = service_pb2.ModelInferRequest.FromString(encode_request(asked, {"r"}))
    kinds = [
        {key: slot.WhichOneof("parameter_choice") for key, slot in tensor.parameters.items()}
        for tensor in message.inputs
    ]
    place = {"shared_memory_region": "string_param", "shared_memory_byte_size": "int64_param"}
    assert kinds == [place | {"shared_memory_offset": "int64_param"}, {}, place, {}]
    assert message.inputs[0].parameters["shared_memory_offset"].int64_param == 64
    assert message.inputs[0].parameters["shared_memory_byte_size"].int64_param == X.nbytes
    assert list(message.raw_input_contents) == [X.tobytes()] * 2


@pytest.mark.parametrize(
    ("datatype", "size_bytes"), [(Datatype.UINT8, 24), (Datatype.FP16, 48), (Datatype.FP32, 96), (Datatype.BF16, 48)]
)
def test_tensor_whose_bytes_are_nowhere_but_in_a_region_is_as_large_as_its_shape(
    datatype: Datatype, size_bytes: int
) -> None:
    """GPU memory has no view on the host."""
    tensor = Tensor("x", datatype, (2, 3, 2, 2), memoryview(b""), SlabAddress("r", 1, 512))
    message = service_pb2.ModelInferRequest.FromString(encode_request(InferRequest("double", (tensor,)), {"r"}))
    (slot,) = message.inputs
    assert slot.parameters["shared_memory_byte_size"].int64_param == size_bytes
    assert (list(slot.shape), list(message.raw_input_contents)) == ([2, 3, 2, 2], [])


async def test_region_that_the_engine_lost_is_sent_and_reported(fake: FakeTriton, backend: TritonEngine) -> None:
    """The request is answered all the same, once more with every byte, and later ones are not tried by place."""
    lost: list[str] = []
    backend.use_region("r", lambda: lost.append("r"))
    tensor = replace(tensor_from_numpy("x", X), place=SlabAddress("r", 1, 0))
    for _ in range(2):
        response = await backend.infer(InferRequest("double", (tensor,)))
        np.testing.assert_array_equal(response.outputs[0].to_numpy(), X * 2)
    assert lost == ["r"]
    assert fake.grpc_methods.count("ModelInfer") == 3


async def test_region_that_the_engine_lost_under_several_calls_costs_none_of_them(
    fake: FakeTriton, backend: TritonEngine
) -> None:
    """The first call to fail removes the region; all are sent again, and it is reported once."""
    lost: list[str] = []
    backend.use_region("r", lambda: lost.append("r"))
    asked = InferRequest("double", (replace(tensor_from_numpy("x", X), place=SlabAddress("r", 1, 0)),))
    responses = await asyncio.gather(*(backend.infer(asked) for _ in range(4)))
    for response in responses:
        np.testing.assert_array_equal(response.outputs[0].to_numpy(), X * 2)
    assert lost == ["r"]
    assert fake.grpc_methods.count("ModelInfer") == 8


async def test_region_that_was_dropped_is_sent(fake: FakeTriton, backend: TritonEngine) -> None:
    """The engine is gone, or its successor does not know it."""
    backend.use_region("r", lambda: None)
    backend.drop_region("r")
    await backend.infer(InferRequest("double", (replace(tensor_from_numpy("x", X), place=SlabAddress("r", 1, 0)),)))
    assert fake.grpc_methods.count("ModelInfer") == 1
