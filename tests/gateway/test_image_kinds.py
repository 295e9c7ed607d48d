"""POST …/image from HTTP to HTTP over a fake engine, with a layout for every kind of result."""

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest

from penstock.gateway import picture_drawing
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import DeadlineExceeded, InvalidRequest
from penstock.protocol.vision_results import (
    Classes,
    DepthMap,
    Detections,
    Embedding,
    Mask,
    SegmentationMap,
    TextLine,
    TextLines,
    VisionResult,
)
from penstock.vision.layouts.layout import LayoutOptions, Outputs
from penstock.vision.preprocess import Geometry
from penstock.vision.results import ImageRequest, ResultOptions
from tests.gateway.rig import CLASSIFIER, InlinePool, Rig, picture
from tests.rest.harness import Front, Reply

WIDTH, HEIGHT = 120, 80
CORNERS = np.array([[10, 10, 50, 60]], np.float32)
ONE, ID = np.array([0.75], np.float32), np.array([1], np.int64)
KINDS = {  # by function of this module: network type, and the member of the answer
    "masks": (3, "detections"),
    "poses": (0, "detections"),
    "turned": (0, "detections"),
    "classes": (1, "classes"),
    "embedding": (100, "embedding"),
    "text": (100, "text"),
    "areas": (2, "segmentation"),
    "depth": (100, "depth"),
}


def masks(_: Outputs, options: LayoutOptions, geometry: Geometry) -> VisionResult:
    mask = Mask(geometry.source_height, geometry.source_width, 10, 10, np.ones((50, 40), np.bool_))
    return Detections(CORNERS, ONE, ID, masks=(mask,) if options.needs_masks else None)


def poses(*_: object) -> VisionResult:
    return Detections(CORNERS, ONE, ID, keypoints=np.array([[[20, 20, 1], [40, 50, 0.5]]], np.float32))


def turned(*_: object) -> VisionResult:
    return Detections(CORNERS, ONE, ID, xywhr=np.array([[30, 35, 20, 40, 0.5]], np.float32))


def classes(*_: object) -> VisionResult:
    return Classes(ONE, ID)


def embedding(*_: object) -> VisionResult:
    return Embedding(np.array([0.5, -0.25], np.float32))


def text(*_: object) -> VisionResult:
    return TextLines((TextLine("EXIT", 0.75, np.array([[10, 10], [50, 10], [50, 20], [10, 20]], np.float32)),))


def areas(_: Outputs, __: LayoutOptions, geometry: Geometry) -> VisionResult:
    height, width = geometry.source_height, geometry.source_width
    return SegmentationMap(height, width, ID, (Mask(height, width, 0, 0, np.ones((height, 10), np.bool_)),))


def depth(_: Outputs, __: LayoutOptions, geometry: Geometry) -> VisionResult:
    size = (geometry.source_height, geometry.source_width)
    return DepthMap(np.linspace(0, 1, size[0] * size[1], dtype=np.float32).reshape(size))


@pytest.fixture
def pool() -> InlinePool:
    return InlinePool()


@pytest.fixture
def more_models(monkeypatch: pytest.MonkeyPatch) -> tuple[ModelConfig, ...]:
    names = {kind: f"{__name__}:{kind}" for kind in KINDS}
    monkeypatch.setenv("PENSTOCK_LAYOUTS", ",".join(names.values()))
    common = {"labels": "dark;bright", "net-scale-factor": "0.1", "skeleton": "0-1", "keypoint-shape": "2;3"}
    return tuple(
        replace(CLASSIFIER, name=kind, parameters={**common, "network-type": str(KINDS[kind][0]), "layout": name})
        for kind, name in names.items()
    )


async def ask(
    rig: Rig, kind: str, query: str = "", body: bytes | None = None, content_type: str = "image/png"
) -> Reply:
    front = Front(plane=rig.plane)  # type: ignore[arg-type]
    image = picture(100, WIDTH, HEIGHT) if body is None else body
    headers = ((b"content-type", content_type.encode()),)
    return await front.ask("POST", f"/v2/models/{kind}/image{query}", image, headers)


async def result(rig: Rig, kind: str, query: str = "") -> dict[str, Any]:
    reply = await ask(rig, kind, query)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json"), reply.body
    (found,) = json.loads(reply.body)["results"]
    return dict(found)


@pytest.mark.parametrize("kind", KINDS)
async def test_image_answers_every_kind_of_result(rig: Rig, kind: str) -> None:
    """The answer has the member of its kind, and no other."""
    assert list(await result(rig, kind)) == [KINDS[kind][1]]


async def test_image_answers_masks_in_the_form_that_is_asked_for(rig: Rig) -> None:
    """By default as run lengths; with masks=none the layout does not compute them."""
    assert set((await result(rig, "masks"))["detections"][0]) >= {"mask"}
    outline = (await result(rig, "masks", "?masks=polygon"))["detections"][0]["polygons"]
    assert outline == [[[10.0, 10.0], [10.0, 59.0], [49.0, 59.0], [49.0, 10.0]]]
    assert set((await result(rig, "masks", "?masks=none"))["detections"][0]) == {"xyxy", "class_id", "label", "score"}


@pytest.mark.parametrize("kind", KINDS)
async def test_image_with_draw_answers_a_jpeg_of_the_picture_with_the_result(rig: Rig, kind: str) -> None:
    """It has the picture's size, and differs from the plain picture where the result is."""
    reply = await ask(rig, kind, "?draw=1")
    assert (reply.status, reply.headers["content-type"]) == (200, "image/jpeg"), reply.body
    drawn = cv2.imdecode(np.frombuffer(reply.body, np.uint8), cv2.IMREAD_COLOR)
    assert drawn is not None
    assert drawn.shape == (HEIGHT, WIDTH, 3)
    assert (np.abs(drawn.astype(int) - 100).max(axis=2) > 50).sum() > 40
    if kind != "depth":
        assert np.abs(drawn[HEIGHT - 8 :, WIDTH - 8 :].astype(int) - 100).max() < 8


@pytest.mark.parametrize(
    ("kind", "query", "why"),
    [
        ("classes", "?iou=0.5", "iou has no effect on this model (classifier"),
        ("masks", "?classes=brigt", "the model has no label 'brigt'; did you mean 'bright'"),
        ("masks", "?classes=999", "the model has no class 999; its class ids are 0 to "),
        ("masks", "?conf=2", "query parameter 'conf' is '2'"),
        ("masks", "?draw=1&draw=1", "query parameter 'draw' is given twice"),
    ],
)
async def test_image_with_a_parameter_that_is_not_valid_is_400(rig: Rig, kind: str, query: str, why: str) -> None:
    """One sentence; the engine is not called."""
    calls = len(rig.backend.calls)
    reply = await ask(rig, kind, query)
    assert reply.status == 400
    assert why in json.loads(reply.body)["error"]
    assert len(rig.backend.calls) == calls


async def test_image_with_draw_and_several_pictures_is_400(rig: Rig) -> None:
    """A drawing is one picture."""
    part = b'--b\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n' + picture(1) + b"\r\n"
    reply = await ask(rig, "masks", "?draw=1", part + part + b"--b--\r\n", "multipart/form-data; boundary=b")
    assert (reply.status, b"draw=1 with 2 pictures" in reply.body) == (400, True)


async def test_image_with_draw_of_a_picture_that_no_jpeg_holds_is_400(rig: Rig) -> None:
    """A PNG may be longer than a JPEG."""
    reply = await ask(rig, "classes", "?draw=1", picture(1, 65501, 1))
    assert (reply.status, b"65501 x 1 pixels" in reply.body) == (400, True)


async def test_draw_keeps_its_slot_until_the_thread_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late drawing is 504 at its deadline, and the next waits for its thread; then all slots are free again."""
    entered, released = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*_: object) -> bytes:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(30)
        return b"drawn"

    monkeypatch.setattr(picture_drawing, "_drawn", slow)
    slots = rig.images._drawer.slots
    monkeypatch.setattr(slots._queue, "limit", 1)

    def drawn(seconds: float) -> "asyncio.Task[Any]":
        request = ImageRequest("classes", "", (picture(1),), time.monotonic() + seconds, is_drawn=True)
        return asyncio.create_task(rig.plane.infer_images(request))

    first = drawn(1.0)
    await asyncio.wait_for(entered.wait(), 30)
    with pytest.raises(DeadlineExceeded, match="the deadline passed while the picture was drawn"):
        await first
    with pytest.raises(DeadlineExceeded, match="waiting for the pictures that are drawn before it"):
        await drawn(0.2)
    released.set()
    assert (await drawn(30.0)).drawing == b"drawn"
    assert slots.held == 0


async def test_results_with_pixels_are_read_a_few_at_a_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading and writing happen in threads, in slots; the event loop's thread does neither."""
    slots = rig.images._readers
    monkeypatch.setattr(slots._queue, "limit", 2)
    held: list[int] = []
    own = threading.current_thread()

    def write(result: object, labels: Sequence[str]) -> str:
        assert threading.current_thread() is not own
        held.append(slots.held)
        return f"{type(result).__name__} {labels[1]}"

    request = ImageRequest("depth", "", (picture(1), picture(2)), None, write=write)
    answers = await asyncio.gather(*(rig.plane.infer_images(request) for _ in range(4)))
    assert [answer.results for answer in answers] == [("DepthMap bright", "DepthMap bright")] * 4
    assert len(held) == 8
    assert max(held) <= 2
    assert slots.held == 0


async def test_wanted_options_of_one_request_do_not_reach_the_next(rig: Rig) -> None:
    """The model's card stays as it is."""
    strict = ImageRequest("boxes", "", (picture(1),), None, result_options=ResultOptions(conf=0.9))
    (none,) = (await rig.plane.infer_images(strict)).results
    (one,) = (await rig.plane.infer_images(replace(strict, result_options=ResultOptions()))).results
    assert isinstance(none, Detections)
    assert isinstance(one, Detections)
    assert (len(none.score), len(one.score)) == (0, 1)
    with pytest.raises(InvalidRequest, match="no label"):
        await rig.plane.infer_images(replace(strict, result_options=ResultOptions(classes=("nothing",))))
