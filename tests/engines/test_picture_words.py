"""The gateway and the engine read the same config.pbtxt: what both make of a model that decodes is the same."""

import pytest

from penstock.engines.torch_serving.picture_spec import picture_spec
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Datatype
from penstock.vision.card import card_from_config
from penstock.vision.spec import PrepareSpec
from tests.engines.test_picture_kernel import of_the_gateway

LEAST = {"network-type": "1", "image-decoder": "engine", "infer-dims": "3;224;256"}
IMAGENET = {
    "net-scale-factor": "0.00392156862745098",
    "offsets": "123.675;116.28;103.53",
    "channel-scale-factors": "4.366812227074235;4.464285714285714;4.444444444444445",
}


def by_gateway(parameters: dict[str, str]) -> PrepareSpec:
    inputs, outputs = (TensorSpec("image", Datatype.BYTES, (1,)),), (TensorSpec("logits", Datatype.FP32, (1000,)),)
    card = card_from_config(ModelConfig("resnet", "torch", 64, inputs, outputs, parameters))
    assert card is not None
    return card.prepare_spec


def by_engine(parameters: dict[str, str]) -> PrepareSpec:
    """In the gateway's record."""
    config = {
        "max_batch_size": 64,
        "input": [{"name": "image", "data_type": "TYPE_STRING", "dims": [1]}],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    spec = picture_spec(config)
    assert spec is not None
    return of_the_gateway(spec)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"image-decoder": "1"},
        {"image-decoder": "ENGINE", "scaling-filter": "1", "network-input-order": "0", "scaled-decode": "0"},
        IMAGENET,
        {**IMAGENET, "offsets": "123.675; 116.28; 103.53;", "model-color-format": "BGR"},
        {**IMAGENET, "resize-shorter-side": "292"},
        {"model-color-format": "2", "infer-dims": "1;28;28", "offsets": "127.5", "channel-scale-factors": "2"},
        {"maintain-aspect-ratio": "1", "scaling-filter": "bilinear"},
        {"maintain-aspect-ratio": "true", "symmetric-padding": "on"},
        {"maintain-aspect-ratio": "0", "symmetric-padding": "1"},
        {"maintain-aspect-ratio": "1", "padding-value": "0"},
        {"infer-dims": "3; 224; 256;"},
    ],
    ids=str,
)
def test_words_both_read_are_read_alike(said: dict[str, str]) -> None:
    """Every word in every form that the gateway takes means the same to the engine."""
    parameters = {**LEAST, **said}
    assert by_engine(parameters) == by_gateway(parameters)


@pytest.mark.parametrize(
    "said",
    [
        {"infer-dims": "1;224;224"},
        {"infer-dims": "3;224"},
        {"infer-dims": "3;0;224"},
        {"model-color-format": "NV12"},
        {"offsets": "1;2"},
        {"net-scale-factor": "much"},
        {"net-scale-factor": "0"},
        {"channel-scale-factors": "1;0;1"},
        {"scaling-filter": "area"},
        {"network-input-order": "NHWC"},
        {"resize-shorter-side": "100"},
        {"resize-shorter-side": "256", "maintain-aspect-ratio": "1"},
        {"maintain-aspect-ratio": "maybe"},
        {"padding-value": "114", "maintain-aspect-ratio": "1"},
        {"padding-value": "grey", "maintain-aspect-ratio": "1"},
        {"min-side": "100"},
        {"max-side": "100"},
        {"size-multiple": "32"},
        {"min-width": "320"},
    ],
    ids=str,
)
def test_words_that_the_gateway_refuses_the_engine_refuses_too(said: dict[str, str]) -> None:
    """A model is not loaded by one and refused by the other."""
    parameters = {**LEAST, **said}
    with pytest.raises(InvalidRequest):
        by_gateway(parameters)
    with pytest.raises(Exception, match="parameter") as raised:
        by_engine(parameters)
    assert type(raised.value).__name__ == "TorchLoadError"
