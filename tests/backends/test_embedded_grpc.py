"""The embedded engine over gRPC where no Triton is: answers, and the calls that nobody answers."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from server.backends.embedded.engine import EmbeddedEngine
from server.backends.embedded.wire.relay import EmbeddedRelay
from server.core.errors import BackendUnavailable, DeadlineExceeded
from server.core.relay import GrpcAnswer
from tests.contract.wire_case import F123, grpc_call, infer_request
from tests.contract.wire_models import write_plain

CALL = grpc_call("ModelInfer", infer_request(id="7"))


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    """An engine with one model, `plain`: [N, 3] FP32, at most 8 rows, answers its input."""
    write_plain(tmp_path)
    engine = EmbeddedEngine((tmp_path,))
    await engine.load("plain")
    yield engine
    await engine.aclose()


async def test_grpc_infer_answers_raw_tensors(engine: EmbeddedEngine) -> None:
    """Name, version, id, and the output's bytes."""
    answer = await EmbeddedRelay(engine).grpc(CALL, deadline=None)
    message = service_pb2.ModelInferResponse.FromString(answer.message)
    assert (answer.code, message.model_name, message.model_version, message.id) == (0, "plain", "1", "7")
    assert list(message.raw_output_contents) == [F123]


async def test_grpc_refusals_are_answers(engine: EmbeddedEngine) -> None:
    """INVALID_ARGUMENT, NOT_FOUND, UNIMPLEMENTED, with their sentences."""
    relay = EmbeddedRelay(engine)
    short = await relay.grpc(grpc_call("ModelInfer", infer_request(x=F123[:4])), deadline=None)
    assert (short.code, short.details.endswith("Expected 12, got 4")) == (3, True)
    nobody = await relay.grpc(grpc_call("ModelMetadata", service_pb2.ModelMetadataRequest(name="n")), deadline=None)
    assert nobody == GrpcAnswer(5, details="Request for unknown model: 'n' is not found")
    trace = await relay.grpc(grpc_call("TraceSetting", b""), deadline=None)
    assert trace == GrpcAnswer(12, details="the embedded engine has no TraceSetting")


async def test_grpc_calls_without_an_engine_or_time_are_not_answered(engine: EmbeddedEngine) -> None:
    """As Relay says: the transport tells of what no engine answered."""
    relay = EmbeddedRelay(engine)
    with pytest.raises(DeadlineExceeded):
        await relay.grpc(CALL, deadline=time.monotonic() - 1)
    await engine.aclose()
    with pytest.raises(BackendUnavailable):
        await relay.grpc(CALL, deadline=None)
