"""The canary is a real inference of zeros, or of a grey picture."""

import pytest

from penstock.engines.probes import canary_request
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype
from penstock.vision.decode import decode
from penstock.vision.spec import ColorFormat


def config_of(*specs: TensorSpec, max_batch_size: int = 0, **fields: object) -> ModelConfig:
    return ModelConfig("m", "python", max_batch_size, specs, (), **fields)  # type: ignore[arg-type]


def test_canary_request_fills_varying_dimensions_with_one() -> None:
    """Zeros of the declared type, a batch axis where the model has one, 1 where a dimension varies."""
    request = canary_request(
        config_of(TensorSpec("a", Datatype.FP32, (-1, 3)), TensorSpec("b", Datatype.BYTES, (2,)), max_batch_size=4),
        deadline=1.0,
    )
    assert request is not None
    assert [tensor.shape for tensor in request.inputs] == [(1, 1, 3), (1, 2)]
    assert request.inputs[0].to_numpy().tolist() == [[[0.0, 0.0, 0.0]]]
    assert request.inputs[1].to_numpy().tolist() == [[b"", b""]]


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, (1,)), (8, (1, 1))])
def test_canary_of_a_model_that_decodes_pictures_is_one(max_batch_size: int, shape: tuple[int, ...]) -> None:
    """A whole JPEG, grey all over: an empty string would say nothing of what such a model does."""
    parameters = {"image-decoder": "engine"}
    spec = TensorSpec("a", Datatype.BYTES, (1,))
    request = canary_request(config_of(spec, max_batch_size=max_batch_size, parameters=parameters), deadline=1.0)
    assert request is not None
    (tensor,) = request.inputs
    assert tensor.shape == shape
    pixels = decode(tensor.to_numpy().ravel()[0], ColorFormat.RGB).pixels
    assert (pixels.shape, set(pixels.ravel().tolist())) == ((16, 16, 3), {128})


@pytest.mark.parametrize(
    "config",
    [
        config_of(TensorSpec("a", Datatype.FP32, (1,)), has_sequence_batching=True),
        config_of(TensorSpec("a", Datatype.FP32, (1,)), is_decoupled=True),
        config_of(TensorSpec("a", Datatype.FP32, (1,)), parameters={"canary": "off"}),
        config_of(TensorSpec("a", Datatype.FP32, (1 << 40,))),
        config_of(),
    ],
)
def test_canary_request_for_model_that_zeros_cannot_judge_is_none(config: ModelConfig) -> None:
    """Stateful, decoupled, huge and opted-out models have no canary."""
    assert canary_request(config, deadline=1.0) is None
