"""Encoded images as tensors: rows, limits and refusals, over a fake engine."""

import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.metrics import Metrics
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import DeadlineExceeded, InvalidRequest, TooLarge, UndecodableImage, UnsupportedMedia
from penstock.protocol.inference import Array, Datatype
from penstock.protocol.request_checks import ImageInput
from penstock.testing import FakeEngine
from penstock.vision.results import ImageRequest
from tests.gateway.rig import InlinePool, picture

OUTPUTS = (TensorSpec("p", Datatype.FP32, (3,)),)
SCALED = {"network-type": "1", "net-scale-factor": "0.00392156862745098"}
BATCHES = ModelConfig("batches", "onnxruntime", 3, (TensorSpec("x", Datatype.FP32, (3, 8, 8)),), OUTPUTS, SCALED)
ONE = replace(BATCHES, name="one", max_batch_size=0, inputs=(TensorSpec("x", Datatype.FP32, (1, 3, 8, 8)),))
MANY = replace(BATCHES, name="many", max_batch_size=0, inputs=(TensorSpec("x", Datatype.FP32, (-1, 3, 8, 8)),))
OWN_SIZE = ModelConfig(
    "own",
    "python",
    4,
    (TensorSpec("image", Datatype.UINT8, (-1, -1, 3)),),
    OUTPUTS,
    {"network-type": "1", "network-input-order": "1"},
)
TEXTS = ModelConfig("texts", "python", 8, (TensorSpec("x", Datatype.BYTES, (1,)),), OUTPUTS, {"network-type": "1"})
PLAIN = ModelConfig("plain", "python", 8, (TensorSpec("x", Datatype.FP32, (3, 8, 8)),), OUTPUTS)
SIZE = TensorSpec("size", Datatype.INT64, (2,))
SIZED = replace(
    BATCHES, name="sized", inputs=(*BATCHES.inputs, SIZE), parameters={**SCALED, "image-size-input": "size"}
)
SIZED_ONE = replace(
    ONE,
    name="sized-one",
    inputs=(replace(SIZE, shape=(1, 2), datatype=Datatype.FP32), *ONE.inputs),
    parameters=SIZED.parameters,
)
SIZED_MANY = replace(
    MANY, name="sized-many", inputs=(*MANY.inputs, replace(SIZE, shape=(-1, 2))), parameters=SIZED.parameters
)
WRONG = replace(BATCHES, name="wrong", parameters={"network-type": "7"})


@dataclass
class Rig:
    images: ImageFlow
    metrics: Metrics

    async def tensor(self, model: str, *images: bytes) -> Array:
        (tensor,) = await self.images.tensors(ImageRequest(model, "", images, None), model)
        return tensor.to_numpy()


@pytest.fixture
async def rig() -> Rig:
    backend = FakeEngine((BATCHES, ONE, MANY, OWN_SIZE, TEXTS, PLAIN, WRONG, SIZED, SIZED_ONE, SIZED_MANY))
    watch = EngineWatch(backend, WatchOptions())
    for name in ("batches", "one", "many", "own", "texts", "plain", "wrong", "sized", "sized-one", "sized-many"):
        await watch.note_loaded(name)
    metrics = Metrics()
    return Rig(ImageFlow(backend=backend, watch=watch, pool=InlinePool(), metrics=metrics), metrics)  # type: ignore[arg-type]


async def test_images_become_rows_in_their_order(rig: Rig) -> None:
    """(N, 3, 8, 8), scaled as the model says, counted as decoded."""
    array = await rig.tensor("batches", picture(255), picture(0), picture(51))
    assert array.shape == (3, 3, 8, 8)
    np.testing.assert_allclose(array.mean(axis=(1, 2, 3)), [1.0, 0.0, 0.2], atol=1e-6)
    assert b'penstock_decode_seconds_count{model="batches"} 1.0' in rig.metrics.text()
    assert b'penstock_batch_size_sum{model="batches"} 3.0' in rig.metrics.text()


@pytest.mark.parametrize(("model", "count", "shape"), [("one", 1, (1, 3, 8, 8)), ("many", 3, (3, 3, 8, 8))])
async def test_model_without_batching_takes_what_its_first_dimension_takes(
    rig: Rig, model: str, count: int, shape: tuple[int, ...]
) -> None:
    """A declared 1 takes one image, a variable one takes several."""
    assert (await rig.tensor(model, *[picture(9)] * count)).shape == shape


@pytest.mark.parametrize(("model", "most"), [("batches", 3), ("one", 1)])
async def test_more_images_than_the_model_takes_are_refused_before_one_is_decoded(
    rig: Rig, model: str, most: int
) -> None:
    """The sentence has both numbers, and what to do."""
    with pytest.raises(
        InvalidRequest, match=f"{most + 1} images for model '{model}', which takes {most} at once; send"
    ):
        await rig.tensor(model, *[b"never looked at"] * (most + 1))


async def test_images_of_their_own_size_fit_one_tensor_only_when_they_are_alike(rig: Rig) -> None:
    """Two of one size stack; two of unlike sizes are refused, not padded."""
    assert (await rig.tensor("own", picture(1), picture(2))).shape == (2, 10, 20, 3)
    with pytest.raises(InvalidRequest, match="own size, and these differ"):
        await rig.tensor("own", picture(1), picture(2, width=21))


async def test_bad_picture_is_named_by_its_number(rig: Rig) -> None:
    """400, also for what is no picture at all: the body is v2's, so 415 would say nothing of it."""
    with pytest.raises(UndecodableImage, match="image 2 of 2: "):
        await rig.tensor("batches", picture(1), picture(1)[:40])
    with pytest.raises(InvalidRequest, match=r"image 2 of 2: not an image format") as refused:
        await rig.tensor("batches", picture(1), b"<svg/>")
    assert not isinstance(refused.value, UnsupportedMedia)
    assert b'penstock_decode_errors_total{codec="unknown",reason="unsupported_media"} 1.0' in rig.metrics.text()


async def test_tensor_over_its_limit_is_too_large(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the network's size before a picture is decoded, by the arrays where pictures keep their own size."""
    monkeypatch.setattr("penstock.vision.image_tasks.MAX_TENSOR_BYTES", 2 * 3 * 8 * 8 * 4)
    assert (await rig.tensor("batches", picture(1), picture(1))).shape[0] == 2
    with pytest.raises(TooLarge, match="send fewer or smaller"):
        await rig.tensor("batches", picture(1), picture(1), picture(1))
    with pytest.raises(TooLarge, match="send fewer or smaller"):
        await rig.tensor("own", picture(1, width=40, height=40))


async def test_images_past_their_deadline_are_given_up_while_they_are_decoded(rig: Rig) -> None:
    """The deadline is kept on the way to the engine, too."""
    late = ImageRequest("batches", "", (picture(1),), time.monotonic() - 1.0)
    with pytest.raises(DeadlineExceeded, match="while the image was decoded"):
        await rig.images.tensors(late, "batches")


def test_only_models_that_describe_images_have_an_image_input(rig: Rig) -> None:
    """BYTES for any other model are relayed; an invalid card is reported."""
    assert rig.images.input_of("batches") == ImageInput("x", 3 * 8 * 8 * 4)
    assert rig.images.input_of("own") == ImageInput("image", 0)
    assert [rig.images.input_of(name) for name in ("texts", "plain", "unknown")] == [None] * 3
    with pytest.raises(InvalidRequest, match="network-type"):
        rig.images.input_of("wrong")


@pytest.mark.parametrize(
    ("model", "count", "datatype", "sizes"),
    [
        ("sized", 2, Datatype.INT64, [[20, 10], [30, 10]]),
        ("sized", 1, Datatype.INT64, [[20, 10]]),
        ("sized-one", 1, Datatype.FP32, [[20.0, 10.0]]),
        ("sized-many", 2, Datatype.INT64, [[20, 10], [30, 10]]),
    ],
)
async def test_model_with_an_input_for_sizes_gets_width_and_height_of_each_image(
    rig: Rig, model: str, count: int, datatype: Datatype, sizes: list[list[float]]
) -> None:
    """In the pictures' order and in the input's type and shape."""
    images = (picture(1), picture(2, width=30))[:count]
    first, second = await rig.images.tensors(ImageRequest(model, "", images, None), model)
    assert (first.name, first.shape[0]) == ("x", count)
    assert (second.name, second.datatype, second.to_numpy().tolist()) == ("size", datatype, sizes)
