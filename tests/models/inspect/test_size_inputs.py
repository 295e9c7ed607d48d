"""The second input, for the picture's size: the trial run and the gateway give the network the same tensor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.engines.config_pbtxt import read_config
from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.metrics import Metrics
from penstock.models.add import AddOptions, add_model
from penstock.models.inspect.inspection import Hints
from penstock.models.inspect.trial_session import TrialSession
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Datatype, InferRequest, Tensor, tensor_from_numpy
from penstock.protocol.vision_results import Detections
from penstock.testing import FakeEngine
from penstock.vision.card import card_from_config
from penstock.vision.image_tasks import check_image_count, size_tensors
from penstock.vision.preprocess import Geometry
from penstock.vision.results import ImageRequest
from tests.gateway.rig import InlinePool, picture
from tests.models.inspect.made_models import Array, inspected

WIDTH, HEIGHT = 40, 24
PART = (0.25, 0.25, 0.75, 0.75)  # of the picture: the box that the network finds
BATCHED: Sequence[int | str] = ("N", 3, 64, 64)


def write(path: Path, image: Sequence[int | str], size: Sequence[int | str], kind: int) -> Path:
    """RT-DETR's inputs and outputs. Its boxes are the same part of every picture, in pixels by the size input."""
    nodes = [
        helper.make_node("Cast", ["orig_target_sizes"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["number", "rows"], ["sides"]),
        helper.make_node("Concat", ["sides", "sides"], ["scale"], axis=2),
        helper.make_node("Mul", ["scale", "part"], ["boxes"]),
        helper.make_node("Gather", ["sides", "first"], ["width"], axis=2),
        helper.make_node("Mul", ["width", "zero"], ["zeros"]),
        helper.make_node("Add", ["zeros", "score"], ["scores"]),
        helper.make_node("Cast", ["zeros"], ["labels"], to=TensorProto.INT64),
    ]
    constants = {
        "rows": np.array([-1, 1, 2], np.int64),
        "part": np.array(PART, np.float32).reshape(1, 1, 4),
        "first": np.array(0, np.int64),
        "zero": np.array(0, np.float32),
        "score": np.array(0.9, np.float32),
    }
    inputs = [("images", TensorProto.FLOAT, image), ("orig_target_sizes", kind, size)]
    outputs = [
        ("labels", TensorProto.INT64, (image[0], 1)),
        ("boxes", TensorProto.FLOAT, (image[0], 1, 4)),
        ("scores", TensorProto.FLOAT, (image[0], 1)),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*one) for one in inputs],
        [helper.make_tensor_value_info(*one) for one in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def trial_size(path: Path, photo: Path, monkeypatch: pytest.MonkeyPatch) -> Array:
    """The size tensor of the trial's first picture."""
    feeds: list[Mapping[str, Array]] = []
    run = TrialSession.run

    def recorded(session: TrialSession, feed: Mapping[str, Array]) -> dict[str, Array]:
        feeds.append(feed)
        return run(session, feed)

    monkeypatch.setattr(TrialSession, "run", recorded)
    found = inspected(path, None, photo)
    assert found.is_servable, found.reason
    assert found.recognition.layout == "rt-detr"
    return feeds[-1]["orig_target_sizes"]


async def served(folder: Path, *pictures: bytes) -> tuple[list[Array], list[Detections]]:
    """Size tensors of the calls for one request, and its results."""
    config = read_config(folder / "config.pbtxt")
    session: Any = onnxruntime.InferenceSession(str(folder / "1" / "model.onnx"))

    def answer(request: InferRequest) -> list[Tensor]:
        names = ["labels", "boxes", "scores"]
        arrays = session.run(names, {tensor.name: tensor.to_numpy() for tensor in request.inputs})
        return [tensor_from_numpy(name, array) for name, array in zip(names, arrays, strict=True)]

    engine = FakeEngine([config], answer=answer)
    watch = EngineWatch(engine, WatchOptions())
    await watch.note_loaded(config.name)
    pool: Any = InlinePool()
    batching = BatcherPool(engine, lambda _: None)
    images = ImageFlow(backend=engine, watch=watch, pool=pool, metrics=Metrics(), batching=batching)
    try:
        response = await images.run(
            ImageRequest(config.name, "", pictures, None), await images.model(config.name), config.name
        )
    finally:
        await batching.aclose()
    sizes = [tensor.to_numpy() for call in engine.calls for tensor in call.inputs if tensor.name == "orig_target_sizes"]
    return sizes, [result for result in response.results if isinstance(result, Detections)]


@pytest.mark.parametrize("image", [BATCHED, (1, 3, 64, 64), (3, 64, 64)], ids=str)
@pytest.mark.parametrize("size", [(2,), (1, 2), ("N", 2)], ids=str)
@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT])
async def test_the_gateway_sends_the_size_that_the_trial_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: Sequence[int | str], size: Sequence[int | str], kind: int
) -> None:
    """Type, shape and values: with and without batch axes, and for two pictures of different sizes in one request."""
    path = write(tmp_path / "model.onnx", image, size, kind)
    wide, high = picture(9, WIDTH, HEIGHT), picture(9, HEIGHT, WIDTH)
    photo = tmp_path / "wide.png"
    photo.write_bytes(wide)
    tried = trial_size(path, photo, monkeypatch)
    assert tried.ravel().tolist() == [WIDTH, HEIGHT]
    added = add_model(path, "m", AddOptions(Hints(), pictures=(photo,)), home=tmp_path / "home")
    (sent,), (found,) = await served(added.folder, wide)
    assert (sent.dtype, sent.shape, sent.tolist()) == (tried.dtype, tried.shape, tried.tolist())
    sizes, both = await served(added.folder, wide, high)
    assert [side for one in sizes for side in one.ravel().tolist()] == [WIDTH, HEIGHT, HEIGHT, WIDTH]
    for result, (width, height) in zip(
        (found, *both), ((WIDTH, HEIGHT), (WIDTH, HEIGHT), (HEIGHT, WIDTH)), strict=True
    ):
        assert result.xyxy.tolist() == [[width / 4, height / 4, width * 3 / 4, height * 3 / 4]]


def test_a_size_of_other_pictures_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """Two rows of sizes beside one picture: the trial's reason quotes ONNX Runtime's error."""
    found = inspected(write(tmp_path / "model.onnx", (1, 3, 64, 64), (3, 2), TensorProto.INT64))
    assert not found.is_servable
    assert "orig_target_sizes" in found.reason


def test_a_size_input_of_one_picture_takes_one_row() -> None:
    """A config without max_batch_size whose picture has a free batch axis: two pictures are refused, not mixed."""
    sizes = (TensorSpec("images", Datatype.FP32, (-1, 3, 64, 64)), TensorSpec("size", Datatype.INT64, (2,)))
    outputs = tuple(TensorSpec(name, Datatype.FP32, (-1,)) for name in ("labels", "boxes", "scores"))
    parameters = {"network-type": "0", "layout": "rt-detr", "image-size-input": "size"}
    config = ModelConfig("m", "onnxruntime", 0, sizes, outputs, parameters)
    card = card_from_config(config)
    assert card is not None
    one = Geometry(WIDTH, HEIGHT, 64, 64, 1.0, 1.0)
    (tensor,) = size_tensors(card, [one], has_batch_axis=True)
    assert tensor.to_numpy().tolist() == [WIDTH, HEIGHT]
    with pytest.raises(InvalidRequest, match="the model's input for sizes takes one image, not 2"):
        size_tensors(card, [one, one], has_batch_axis=True)
    with pytest.raises(InvalidRequest, match="takes 1 at once"):
        check_image_count(config, card, 2)
