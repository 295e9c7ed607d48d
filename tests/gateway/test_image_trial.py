"""The trial picture that is sent through the path of /image when a model is loaded."""

from dataclasses import replace

import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import EngineUnavailable
from penstock.protocol.inference import Datatype
from penstock.testing import FakeMode
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.spec import NetworkType
from tests.gateway.rig import CLASSIFIER, DETECTOR, TENSORS_ONLY, InlinePool, Rig

DETECTOR_LAYOUTS = [name for name, layout in LAYOUTS.items() if layout.network_type is NetworkType.DETECTOR]


@pytest.fixture
def pool() -> InlinePool:
    return InlinePool()


def counts(rig: Rig) -> list[str]:
    return [
        line
        for line in rig.metrics.text().decode().splitlines()
        if line.startswith("penstock_") and ("_count" in line or "_total" in line)
    ]


@pytest.mark.parametrize("config", [DETECTOR, CLASSIFIER])
async def test_model_that_answers_pictures_passes_and_nothing_is_counted(rig: Rig, config: ModelConfig) -> None:
    """The trial does not count as a client's request."""
    before = counts(rig)
    assert await rig.images.trial(config, 30.0) == ""
    assert counts(rig) == before


@pytest.mark.parametrize("config", [DETECTOR, CLASSIFIER])
@pytest.mark.parametrize("mode", [FakeMode.GARBAGE, FakeMode.NAN, FakeMode.ERROR])
async def test_model_whose_answer_cannot_be_read_fails_with_the_reason(
    rig: Rig, config: ModelConfig, mode: FakeMode
) -> None:
    """Wrong outputs, shapes or datatypes, NaN or infinity, and errors fail."""
    rig.backend.mode = mode
    why = await rig.images.trial(config, 30.0)
    assert why.startswith("a picture through /image: ")


def with_parameters(config: ModelConfig, **parameters: str) -> ModelConfig:
    """The same model with these parameters, `_` for `-`, in addition to its own."""
    added = {key.replace("_", "-"): value for key, value in parameters.items()}
    return replace(config, name="m", parameters={**config.parameters, **added})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            with_parameters(DETECTOR, parse_bbox_func_name="nosuch"),
            f"parameter 'parse-bbox-func-name' = 'nosuch' is not one of: {', '.join(DETECTOR_LAYOUTS)}",
        ),
        (
            with_parameters(CLASSIFIER, network_type="7"),
            "parameter 'network-type' = '7' is not one of: 0 or detector, 1 or classifier, 2 or segmentation, "
            "3 or instance_segmentation, 100 or other",
        ),
        (
            with_parameters(CLASSIFIER, net_scale_facter="1"),
            "parameter 'net-scale-facter' = '1' is an unknown key; did you mean 'net-scale-factor'?",
        ),
        (
            replace(TENSORS_ONLY, name="m", parameters={"network_type": "1"}),
            "parameter 'network_type' = '1' is an unknown key; did you mean 'network-type'?",
        ),
    ],
)
async def test_model_with_invalid_picture_parameters_fails_with_the_reason(
    rig: Rig, config: ModelConfig, why: str
) -> None:
    """The reason names the key, its value and what is allowed. The engine gets no request."""
    calls = len(rig.backend.calls)
    assert await rig.images.trial(config, 30.0) == why
    assert len(rig.backend.calls) == calls


@pytest.mark.parametrize(("key", "value"), [("network-input-order", "NHWC"), ("model-color-format", "GRAY")])
async def test_model_whose_parameters_do_not_fit_its_picture_fails(rig: Rig, key: str, value: str) -> None:
    """Its input has the shape of a picture, but not in this layout or colour format."""
    config = replace(CLASSIFIER, parameters={**CLASSIFIER.parameters, key: value})
    assert "needs an input of shape" in await rig.images.trial(config, 30.0)


@pytest.mark.parametrize("parameters", [{}, {"label": "a"}, {"top_k": "5"}, {"labels": "a", "topk": "x"}])
async def test_model_without_network_type_takes_no_picture(rig: Rig, parameters: dict[str, str]) -> None:
    """It is served by its tensors, also if its other parameters resemble ours."""
    rig.backend.mode = FakeMode.ERROR
    assert await rig.images.trial(replace(TENSORS_ONLY, parameters=parameters), 30.0) == ""


@pytest.mark.parametrize(
    "inputs",
    [
        (TensorSpec("x", Datatype.FP32, (-1,)),),
        (TensorSpec("x", Datatype.FP32, (16, 32, 32)),),
        (TensorSpec("x", Datatype.BYTES, (1,)),),
        (TensorSpec("x", Datatype.FP32, (3, 32, 32)), TensorSpec("size", Datatype.INT64, (2,))),
    ],
)
async def test_model_whose_input_is_no_picture_takes_none(rig: Rig, inputs: tuple[TensorSpec, ...]) -> None:
    """It is served by its tensors; /image answers 400 with the reason."""
    rig.backend.mode = FakeMode.ERROR
    assert await rig.images.trial(replace(CLASSIFIER, name="m", inputs=inputs), 30.0) == ""


async def test_engine_that_is_down_is_no_verdict(rig: Rig) -> None:
    """The model is tried when the engine is up again."""
    rig.backend.mode = FakeMode.UNAVAILABLE
    with pytest.raises(EngineUnavailable):
        await rig.images.trial(DETECTOR, 30.0)
    rig.backend.mode = FakeMode.NORMAL
