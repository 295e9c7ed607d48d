"""The trial picture that is sent through the path of /image when a model is loaded."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.metrics import Metrics
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import EngineUnavailable, InvalidRequest
from penstock.protocol.inference import Datatype, InferRequest, Tensor, tensor_from_numpy
from penstock.testing import FakeEngine, FakeMode
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
        (TensorSpec("x", Datatype.FP32, (3, 32, 32)), TensorSpec("mask", Datatype.FP32, (1, 32, 32))),
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


async def test_model_whose_second_input_is_not_named_fails(rig: Rig) -> None:
    """An input that could take the picture's size must be named: without it, every picture would be refused."""
    inputs = (TensorSpec("x", Datatype.FP32, (3, 32, 32)), TensorSpec("size", Datatype.INT64, (2,)))
    why = await rig.images.trial(replace(CLASSIFIER, name="m", inputs=inputs), 30.0)
    assert "needs a model with exactly one input, the image (inputs: 'x', 'size')" in why
    assert "name it by image-size-input" in why


Answers = Callable[[InferRequest], list[Tensor]]
BATCHED = replace(CLASSIFIER, name="m", max_batch_size=8, unmerged="")


async def why_of(config: ModelConfig, answers: Answers) -> tuple[str, list[InferRequest]]:
    """What the trial finds of a model that answers so, and what the engine was asked."""
    backend = FakeEngine((config,), answer=answers)
    watch = EngineWatch(backend, WatchOptions())
    flow = ImageFlow(backend=backend, watch=watch, pool=InlinePool(), metrics=Metrics())  # type: ignore[arg-type]
    return await flow.trial(config, 30.0), backend.calls


def scores(*shape: int) -> Answers:
    return lambda request: [tensor_from_numpy("p", np.zeros((request.inputs[0].shape[0], *shape), np.float32))]


@pytest.mark.parametrize(
    ("config", "answers", "why"),
    [
        (BATCHED, scores(3), ""),
        (BATCHED, scores(3, 1, 1), ""),
        (BATCHED, scores(3, 4, 4), "output 'p' has shape [2, 3, 4, 4], in which row 0 of the batch has no 1-D part"),
        (replace(BATCHED, unmerged="no"), scores(3, 4, 4), "output 'p' has shape [1, 3, 4, 4], in which row 0"),
        (
            BATCHED,
            lambda _: [tensor_from_numpy("p", np.zeros(3, np.float32))],
            "output 'p' has shape [3], in which row 1 of the batch has no 1-D part",
        ),
        (
            BATCHED,
            lambda _: [tensor_from_numpy("p", np.zeros((1, 3), np.float32))],
            "output 'p' has shape [1, 3], in which row 1 of the batch has no 1-D part",
        ),
        (replace(BATCHED, unmerged=None), lambda _: [tensor_from_numpy("p", np.zeros((1, 3), np.float32))], ""),
        (BATCHED, lambda _: [tensor_from_numpy("q", np.zeros((2, 3), np.float32))], "output 'p' is missing"),
        (
            with_parameters(BATCHED, network_type="0", layout="detr"),
            lambda _: [tensor_from_numpy("p", np.zeros((2, 5, 4), np.float32))],
            "a picture through /image: ",
        ),
    ],
)
async def test_model_whose_outputs_do_not_fit_its_layout_fails(config: ModelConfig, answers: Answers, why: str) -> None:
    """Wrong rank, a lost batch axis, another output, another layout; a model whose batches are not merged gets one."""
    found, calls = await why_of(config, answers)
    assert (why in found) if why else found == ""
    assert calls[0].inputs[0].shape[0] == (2 if config.unmerged == "" else 1)


@pytest.mark.parametrize("threshold", ["0.99", "0.0001"])
async def test_rows_behind_the_threshold_are_tried(threshold: str) -> None:
    """A client may ask for a threshold of 0.001, so a class id that the layout refuses there fails the trial."""
    parameters = {"network_type": "0", "layout": "boxes", "pre_cluster_threshold": threshold}
    config = replace(with_parameters(DETECTOR, **parameters), name="m")
    config = replace(config, parameters={k: v for k, v in config.parameters.items() if k != "parse-bbox-func-name"})

    def answers(_: InferRequest) -> list[Tensor]:
        return [
            tensor_from_numpy("boxes", np.array([[0, 0, 9, 9]], np.float32)),
            tensor_from_numpy("scores", np.array([0.01], np.float32)),
            tensor_from_numpy("class_ids", np.array([-7], np.int64)),
        ]

    found, _ = await why_of(config, answers)
    assert "output 'class_ids' holds -7; classes are counted from 0" in found


def refusing(_: InferRequest) -> list[Tensor]:
    raise InvalidRequest("unexpected shape for input 'x'")


@pytest.mark.parametrize(
    ("config", "why"),
    [(BATCHED, "a picture through /image: unexpected shape for input 'x'"), (replace(DETECTOR, name="m"), "")],
)
async def test_engine_that_refuses_the_picture_fails_a_model_of_one_size(config: ModelConfig, why: str) -> None:
    """All pictures become tensors of that size; a model of variable size may take others."""
    assert (await why_of(config, refusing))[0] == why


async def test_sizes_of_both_pictures_are_sent() -> None:
    """The input for sizes has a row for each picture, width first."""
    inputs = (*BATCHED.inputs, TensorSpec("size", Datatype.INT64, (2,)))
    config = with_parameters(replace(BATCHED, inputs=inputs), image_size_input="size")
    found, (request,) = await why_of(config, scores(3))
    assert found == ""
    assert request.inputs[1].to_numpy().tolist() == [[500, 375], [640, 480]]
