"""Whether the gateway may merge a model's requests: its config, its ONNX file, and a trial through the engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.engines.probes import RowChecks, try_rows
from penstock.protocol.engine import ModelConfig, ModelMetadata, TensorSpec
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InferenceError
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, Tensor, tensor_from_numpy
from penstock.testing import FakeEngine
from tests.engines import onnx_models

X, Y = TensorSpec("x", Datatype.FP32, (3,)), TensorSpec("y", Datatype.FP32, (3,))
MODEL = ModelConfig("m", "python", 8, (X,), (Y,))
ONNX = replace(MODEL, backend="onnxruntime")
SAID = {"rows_follow_batch": "1"}


def same(request: InferRequest) -> Sequence[Tensor]:
    return (replace(request.inputs[0], name="y"),)


def reversed_rows(request: InferRequest) -> Sequence[Tensor]:
    return (tensor_from_numpy("y", request.inputs[0].to_numpy()[::-1]),)


def written(repository: Path, model: onnx.ModelProto | None) -> list[Path]:
    """A repository with that file as version 1."""
    if model is not None:
        onnx_models.save(model, repository, "m")
    return [repository]


def unnamed() -> onnx.ModelProto:
    """A graph that does not say which dimension is the batch."""
    model = onnx_models.identity()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].ClearField("dim_param")
    return model


@pytest.mark.parametrize(
    ("config", "file", "why"),
    [
        (MODEL, None, ""),
        (ONNX, None, ""),  # its file is elsewhere
        (ONNX, onnx_models.identity(), ""),
        (ONNX, unnamed(), "the first dimension of input 'x' has no name in the ONNX file"),
        (replace(ONNX, parameters=SAID), unnamed(), ""),
        (replace(ONNX, parameters={"rows_follow_batch": "0"}), onnx_models.identity(), "config.pbtxt says"),
        (replace(MODEL, parameters={"rows_follow_batch": "maybe"}), None, "parameter rows_follow_batch is 'maybe'"),
        (replace(MODEL, has_sequence_batching=True), None, "sequence and decoupled models are not tried"),
    ],
)
async def test_models_are_merged_by_config_or_graph(
    config: ModelConfig, file: onnx.ModelProto | None, why: str, tmp_path: Path
) -> None:
    """A readable ONNX file or the config must declare it; for other models max_batch_size does."""
    backend = FakeEngine((config,), answer=same)
    found = await RowChecks(backend, written(tmp_path, file)).why_unmerged(config)
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize("config", [MODEL, ONNX, replace(ONNX, parameters=SAID)])
async def test_model_whose_trial_fails_is_not_merged_whatever_it_says(config: ModelConfig, tmp_path: Path) -> None:
    """Different answers count more than the config and the graph."""
    backend = FakeEngine((config,), answer=reversed_rows)
    checks = RowChecks(backend, written(tmp_path, onnx_models.identity()))
    assert await checks.why_unmerged(config) == "row 1 of output 'y' differs between a batch of 2 and a request alone"


async def test_every_version_that_is_served_is_tried() -> None:
    """Requests to each version may be merged, so one failing version is enough."""

    class TwoVersions(FakeEngine):
        async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata:
            return replace(await super().model_metadata(model_name), versions=("1", "2"))

    def second_is_odd(request: InferRequest) -> Sequence[Tensor]:
        return (reversed_rows if request.model_version == "2" else same)(request)

    backend = TwoVersions((MODEL,), answer=second_is_odd)
    assert "row 1 of output 'y'" in await RowChecks(backend, ()).why_unmerged(MODEL)
    assert [request.model_version for request in backend.calls[:4]] == ["1", "1", "1", "2"]


@pytest.mark.parametrize("error", [EngineUnavailable("down"), DeadlineExceeded("late")])
async def test_trial_without_an_answer_is_no_verdict(error: InferenceError) -> None:
    """An engine that is down or slow is no evidence; the model stays unmerged until it is tried."""

    class Failing(FakeEngine):
        async def infer(self, request: InferRequest) -> InferResponse:
            raise error

    with pytest.raises(type(error)):
        await try_rows(RowChecks(Failing((MODEL,)), ()), MODEL, wants=lambda _: True)


async def test_only_models_that_we_merge_are_tried() -> None:
    """The trial runs inferences, which other models do not need."""
    backend = FakeEngine((MODEL,), answer=same)
    checks = RowChecks(backend, ())
    assert await try_rows(checks, MODEL, wants=lambda _: False) is None
    assert backend.calls == []
    assert await try_rows(checks, MODEL, wants=lambda _: True) == ""
    assert [request.inputs[0].shape for request in backend.calls] == [(1, 3), (1, 3), (2, 3)]


async def test_rows_of_bf16_are_tried_as_the_engine_takes_them() -> None:
    """numpy has no BF16, so two bytes are used for each value."""
    config = replace(MODEL, inputs=(replace(X, datatype=Datatype.BF16),), outputs=(replace(Y, datatype=Datatype.BF16),))
    backend = FakeEngine((config,), answer=same)
    assert await RowChecks(backend, ()).why_unmerged(config) == ""
    assert [request.inputs[0].data.nbytes for request in backend.calls] == [6, 6, 12]
    assert np.ptp(backend.calls[0].inputs[0].to_numpy()) > 0
