"""The embedded engine over gRPC where no Triton is: answers, and unsupported calls."""

import time

import pytest
from tritonclient.grpc import service_pb2

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.protocol.call import GrpcAnswer
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable
from tests.contract.wire_case import F123, grpc_call, infer_request

CALL = grpc_call("ModelInfer", infer_request(id="7"))


async def test_grpc_infer_answers_raw_tensors(plain_engine: EmbeddedEngine) -> None:
    """Name, version, id, and the output's bytes."""
    answer = await plain_engine.send(CALL, deadline=None)
    message = service_pb2.ModelInferResponse.FromString(answer.message)
    assert (answer.code, message.model_name, message.model_version, message.id) == (0, "plain", "1", "7")
    assert list(message.raw_output_contents) == [F123]


async def test_grpc_refusals_are_answers(plain_engine: EmbeddedEngine) -> None:
    """INVALID_ARGUMENT, NOT_FOUND, UNIMPLEMENTED, with their sentences."""
    relay = plain_engine
    short = await relay.send(grpc_call("ModelInfer", infer_request(x=F123[:4])), deadline=None)
    assert (short.code, short.details.endswith("Expected 12, got 4")) == (3, True)
    unknown = await relay.send(grpc_call("ModelMetadata", service_pb2.ModelMetadataRequest(name="n")), deadline=None)
    assert unknown == GrpcAnswer(5, details="Request for unknown model: 'n' is not found")
    nonsense = await relay.send(grpc_call("Nonsense", b""), deadline=None)
    assert nonsense == GrpcAnswer(12, details="the embedded engine has no Nonsense")


async def test_grpc_calls_without_an_engine_or_time_are_not_answered(plain_engine: EmbeddedEngine) -> None:
    """As Relay says: the transport tells of what no engine answered."""
    relay = plain_engine
    with pytest.raises(DeadlineExceeded):
        await relay.send(CALL, deadline=time.monotonic() - 1)
    await plain_engine.aclose()
    with pytest.raises(EngineUnavailable):
        await relay.send(CALL, deadline=None)
