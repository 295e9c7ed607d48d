"""DEIMv2 through the gateway's image flow: its second input gets each picture's own width and height."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest

from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.metrics import Metrics
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import BatchOwner, Datatype, InferRequest, Tensor, tensor_from_numpy
from penstock.protocol.vision_results import Detections
from penstock.testing import FakeEngine
from penstock.vision.results import ImageRequest
from tests.gateway.rig import InlinePool
from tests.support.plain_detections import PlainBox, assert_same_detections

PERSON, CAT, DOG, CUP, CHAIR, TABLE = 0, 15, 16, 41, 56, 60
SIZES = {"astronaut": (512, 512), "chelsea": (451, 300), "coffee": (600, 400)}
# Of ../shared/media/SOURCES.md, corners rounded.
FIGURES = {
    "astronaut": {PERSON: [(0.861, (7, 15, 367, 507))], CHAIR: [(0.393, None)]},
    "chelsea": {CAT: [(0.669, (2, 1, 417, 295))], DOG: [(0.458, None)]},
    "coffee": {TABLE: [(0.810, (0, 0, 599, 395))], CUP: [(0.741, (172, 16, 411, 295)), (0.279, None)]},
}
PARAMETERS = {
    "network-type": "0",
    "layout": "rt-detr",
    "image-size-input": "orig_target_sizes",
    "net-scale-factor": repr(1 / 255),
}


def config(name: str, max_batch_size: int) -> ModelConfig:
    lead = () if max_batch_size else (1,)
    return ModelConfig(
        name,
        "onnxruntime",
        max_batch_size,
        (
            TensorSpec("images", Datatype.FP32, (*lead, 3, 320, 320)),
            TensorSpec("orig_target_sizes", Datatype.INT64, (*lead, 2)),
        ),
        (
            TensorSpec("labels", Datatype.INT64, (*lead, -1)),
            TensorSpec("boxes", Datatype.FP32, (*lead, -1, 4)),
            TensorSpec("scores", Datatype.FP32, (*lead, -1)),
        ),
        PARAMETERS,
        unmerged="",
    )


@pytest.fixture(scope="module")
def session(shared_dir: Path) -> Any:
    """Plain onnxruntime, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(shared_dir / "models" / "deimv2_atto.onnx"), options)


@pytest.fixture(scope="module")
def photos(shared_dir: Path) -> dict[str, bytes]:
    return {name: (shared_dir / "media" / f"{name}.jpg").read_bytes() for name in SIZES}


@pytest.fixture(scope="module")
def wanted(session: Any, photos: dict[str, bytes]) -> dict[str, list[PlainBox]]:
    """By OpenCV and plain onnxruntime, row by row."""
    found = {}
    for name, encoded in photos.items():
        picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
        height, width = picture.shape[:2]
        pixels = cv2.resize(picture, (320, 320)).astype(np.float32) / 255
        inputs = {
            "images": np.ascontiguousarray(pixels.transpose(2, 0, 1)[np.newaxis]),
            "orig_target_sizes": np.array([[width, height]], np.int64),
        }
        labels, boxes, scores = (part[0].tolist() for part in session.run(["labels", "boxes", "scores"], inputs))
        found[name] = [
            PlainBox(max(x0, 0), max(y0, 0), min(x1, width), min(y1, height), label, score)
            for label, (x0, y0, x1, y1), score in zip(labels, boxes, scores, strict=True)
            if score > 0.25
        ]
    return found


@pytest.fixture
def engine(session: Any) -> FakeEngine:
    def answer(request: InferRequest) -> list[Tensor]:
        names = ["labels", "boxes", "scores"]
        outputs = session.run(names, {tensor.name: tensor.to_numpy() for tensor in request.inputs})
        return [tensor_from_numpy(name, array) for name, array in zip(names, outputs, strict=True)]

    return FakeEngine([config("single", 0), config("batched", 4), config("owned", 4)], answer=answer)


@pytest.fixture
async def images(engine: FakeEngine) -> AsyncIterator[ImageFlow]:
    watch = EngineWatch(engine, WatchOptions())
    for name in ("single", "batched", "owned"):
        await watch.note_loaded(name)
    options = BatchOptions(owner=BatchOwner.GATEWAY, max_batch_size=4, instances=1, max_queue_size=9)
    batcher = BatcherPool(engine, lambda name: options if name == "owned" else None)
    pool: Any = InlinePool()
    yield ImageFlow(backend=engine, watch=watch, pool=pool, metrics=Metrics(), batching=batcher)
    await batcher.aclose()


async def detect(images: ImageFlow, model: str, *encoded: bytes) -> list[Detections]:
    request = ImageRequest(model, "", encoded, None)
    response = await images.run(request, await images.model(model), model)
    found = [result for result in response.results if isinstance(result, Detections)]
    assert len(found) == len(encoded)
    return found


def sizes_of(engine: FakeEngine) -> list[list[list[int]]]:
    """The second input of each call."""
    return [
        tensor.to_numpy().tolist()
        for call in engine.calls
        for tensor in call.inputs
        if tensor.name == "orig_target_sizes"
    ]


def assert_figures(found: Detections, name: str) -> None:
    """The reference's figures: classes, scores to three digits, corners to a pixel."""
    left = {class_id: list(figures) for class_id, figures in FIGURES[name].items()}
    for xyxy, class_id, score in zip(found.xyxy, found.class_id.tolist(), found.score.tolist(), strict=True):
        expected, corners = left[class_id].pop(0)
        assert score == pytest.approx(expected, abs=1e-3)
        assert corners is None or xyxy == pytest.approx(corners, abs=1)
    assert not any(left.values())


@pytest.mark.parametrize("name", SIZES)
async def test_boxes_of_a_photo_are_in_its_own_pixels(
    images: ImageFlow, engine: FakeEngine, photos: dict[str, bytes], wanted: dict[str, list[PlainBox]], name: str
) -> None:
    """JPEG → decode → resize → network with the photo's size → boxes: as plain onnxruntime, and as published."""
    (found,) = await detect(images, "single", photos[name])
    assert_same_detections(found, wanted[name])
    assert_figures(found, name)
    assert sizes_of(engine) == [[list(SIZES[name])]]


async def test_photos_of_one_request_each_have_their_own_size_in_the_batch(
    images: ImageFlow, engine: FakeEngine, photos: dict[str, bytes], wanted: dict[str, list[PlainBox]]
) -> None:
    """One call with a row of sizes for each photo."""
    for name, found in zip(photos, await detect(images, "batched", *photos.values()), strict=True):
        assert_same_detections(found, wanted[name])
    assert sizes_of(engine) == [[list(size) for size in SIZES.values()]]


async def test_photos_of_many_clients_each_have_their_own_size_in_a_batch_of_the_gateway(
    images: ImageFlow, engine: FakeEngine, photos: dict[str, bytes], wanted: dict[str, list[PlainBox]]
) -> None:
    """Whatever is merged with them."""
    names = [*photos] * 3
    responses = await asyncio.gather(*(detect(images, "owned", photos[name]) for name in names))
    for name, (found,) in zip(names, responses, strict=True):
        assert_same_detections(found, wanted[name])
    assert len(engine.calls) < len(names)
    assert sorted(row for call in sizes_of(engine) for row in call) == sorted([*map(list, SIZES.values())] * 3)
