"""The fake engine behaves as its modes say, so that tests over it mean something."""

import asyncio
import time

import numpy as np
import pytest

from penstock.protocol.call import GrpcCall
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, EngineUnavailable, ModelNotFound, ModelNotReady
from penstock.protocol.grpc_inference import decode_request
from penstock.protocol.grpc_messages import encode_request
from penstock.protocol.inference import Datatype, InferRequest, tensor_from_numpy
from penstock.testing import FakeEngine, FakeMode

MODEL = ModelConfig(
    "m", "python", 8, (TensorSpec("x", Datatype.FP32, (2,)),), (TensorSpec("y", Datatype.FP32, (-1, 3)),)
)
REQUEST = InferRequest("m", (tensor_from_numpy("x", np.ones((4, 2), np.float32)),))
METHOD = "/inference.GRPCInferenceService/"


async def test_fake_normal_answers_zeros_of_the_declared_shape() -> None:
    """The request's rows, 1 where a dimension varies; calls are recorded."""
    fake = FakeEngine([MODEL])

    response = await fake.infer(REQUEST)

    assert response.outputs[0].shape == (4, 1, 3)
    assert not response.outputs[0].to_numpy().any()
    assert fake.calls == [REQUEST]


async def test_fake_slow_waits_for_release_deadline_or_cancellation() -> None:
    """Each of the three ends it in its own way."""
    fake = FakeEngine([MODEL], mode=FakeMode.SLOW)
    late = InferRequest("m", REQUEST.inputs, deadline=time.monotonic() + 0.05)
    with pytest.raises(DeadlineExceeded):
        await fake.infer(late)

    running = asyncio.create_task(fake.infer(REQUEST))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert fake.cancelled == 1

    running = asyncio.create_task(fake.infer(REQUEST))
    fake.release.set()
    assert (await running).model_name == "m"


async def test_fake_failures_are_of_their_kind() -> None:
    """ERROR fails, GARBAGE breaks the contract, NAN is not a number, UNAVAILABLE does not answer."""
    fake = FakeEngine([MODEL], mode=FakeMode.ERROR)
    with pytest.raises(EngineFailed):
        await fake.infer(REQUEST)
    fake.mode = FakeMode.GARBAGE
    assert (await fake.infer(REQUEST)).output("y") is None
    fake.mode = FakeMode.NAN
    assert np.isnan((await fake.infer(REQUEST)).outputs[0].to_numpy()).all()
    fake.mode = FakeMode.UNAVAILABLE
    assert not await fake.ready()
    for call in (fake.infer(REQUEST), fake.repository_index(), fake.load("m"), fake.model_config("m")):
        with pytest.raises(EngineUnavailable):
            await call


async def test_fake_models_come_and_go() -> None:
    """An unloaded model is not found; a load that is set to fail gives its reason."""
    fake = FakeEngine([MODEL])
    fake.load_failures["bad"] = "no weights"
    await fake.unload("m")
    with pytest.raises(ModelNotFound):
        await fake.infer(REQUEST)
    await fake.load("m")
    assert await fake.ready("m")
    with pytest.raises(ModelNotReady, match="no weights"):
        await fake.load("bad")


async def test_fake_relay_is_the_backend_in_bytes() -> None:
    """A relayed inference reaches `infer` as it was asked, and an error comes back as a status."""
    fake = FakeEngine([MODEL])

    answer = await fake.send(GrpcCall(METHOD + "ModelInfer", encode_request(REQUEST)), deadline=None)
    unknown = await fake.send(GrpcCall(METHOD + "ModelMetadata", b"\x0a\x04nope"), deadline=None)

    assert answer.code == 0
    assert decode_request(encode_request(REQUEST)).inputs[0].data == REQUEST.inputs[0].data
    assert fake.calls[0].inputs[0].shape == (4, 2)
    assert (unknown.code, unknown.details) == (5, "Request for unknown model: 'nope' is not found")
