"""YOLOX-Nano's real weights on real photos: our way from JPEG to boxes equals a plain one with NumPy and OpenCV."""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype, InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Detections
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import decode
from penstock.vision.preprocess import prepare
from penstock.vision.results import parse
from tests.support.plain_detections import PlainBox, assert_same_detections, corner, plain_iou, plain_nms
from tests.vision.layouts.scenes import Array

SIDE = 416
PARAMETERS = {
    "network-type": "0",
    "layout": "yolox",
    "model-color-format": "1",
    "maintain-aspect-ratio": "1",
    "padding-value": "114",
}
PHOTOS = ["astronaut", "chelsea", "coffee"]
# Of media/SOURCES.md: COCO's class, score, corners, by a third reference.
PERSON, CAT, CUP, TABLE = 0, 15, 41, 60
STATED = {
    "astronaut": [PlainBox(11, 20, 369, 507, PERSON, 0.925)],
    "chelsea": [PlainBox(0, 0, 449, 300, CAT, 0.629)],
    "coffee": [PlainBox(162, 16, 421, 296, CUP, 0.894), PlainBox(0, 0, 598, 399, TABLE, 0.747)],
}


@cache
def session(path: Path) -> Any:
    """ONNX Runtime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def card_of_model(network: Any, max_batch_size: int, parameters: Mapping[str, str] = PARAMETERS) -> VisionCard:
    """The card as config.pbtxt would have it."""
    image, output = network.get_inputs()[0], network.get_outputs()[0]
    inputs = (TensorSpec(image.name, Datatype.FP32, (3, SIDE, SIDE)),)
    outputs = (TensorSpec(output.name, Datatype.FP32, (3549, 85)),)
    made = card_from_config(ModelConfig("yolox-nano", "onnxruntime", max_batch_size, inputs, outputs, parameters))
    assert made is not None
    return made


def ours(network: Any, card: VisionCard, photos: list[bytes]) -> list[Detections]:
    """Decodes, prepares, infers in one batch, and parses each row."""
    prepared = [prepare(decode(photo, card.prepare_spec.color), card.prepare_spec) for photo in photos]
    batch = np.stack([array for array, _ in prepared])
    (output,) = network.run(None, {card.input_name: batch})
    response = InferResponse("yolox-nano", "1", (tensor_from_numpy(card.layout_options.output_names[0], output),))
    results = [parse(card, response, row, geometry) for row, (_, geometry) in enumerate(prepared)]
    assert all(isinstance(result, Detections) for result in results)
    return [result for result in results if isinstance(result, Detections)]


def plain(network: Any, photo: bytes) -> list[PlainBox]:
    """OpenCV's decode and resize, one picture a call, and loops over cells and classes."""
    picture = cv2.imdecode(np.frombuffer(photo, np.uint8), cv2.IMREAD_COLOR)
    fit = corner(picture.shape[1], picture.shape[0], SIDE, SIDE)
    canvas = fit.resize(picture, 114).astype(np.float32).transpose(2, 0, 1)
    rows: Array = network.run(None, {network.get_inputs()[0].name: canvas[np.newaxis]})[0][0]
    found, place = [], 0
    for stride in (8, 16, 32):
        for cell_y in range(SIDE // stride):
            for cell_x in range(SIDE // stride):
                x, y, width, height, objectness, *classes = rows[place].tolist()
                score, place = objectness * max(classes), place + 1
                if score > 0.25:
                    x, y = (x + cell_x) * stride, (y + cell_y) * stride
                    half, tall = math.exp(width) * stride / 2, math.exp(height) * stride / 2
                    class_id = classes.index(max(classes))
                    found.append(PlainBox(x - half, y - tall, x + half, y + tall, class_id, score))
    assert place == len(rows)
    return [fit.to_picture(box) for box in plain_nms(found)]


@pytest.mark.parametrize("name", ["yolox_nano", "yolox_nano_free_batch"])
def test_yolox_nano_on_photos_equals_a_plain_decoding_and_the_stated_values(shared_dir: Path, name: str) -> None:
    """One picture a call, or all three in one batch if the file's batch is free."""
    network = session(shared_dir / "models" / f"{name}.onnx")
    photos = [(shared_dir / "media" / f"{photo}.jpg").read_bytes() for photo in PHOTOS]
    has_free_batch = name.endswith("free_batch")
    card = card_of_model(network, 8 if has_free_batch else 1)
    groups = [photos] if has_free_batch else [[photo] for photo in photos]
    results = [result for group in groups for result in ours(network, card, group)]
    for photo, encoded, result in zip(PHOTOS, photos, results, strict=True):
        assert_same_detections(result, plain(network, encoded))
        assert len(result.score) == len(STATED[photo])
        for stated, xyxy, class_id, score in zip(
            STATED[photo], result.xyxy.tolist(), result.class_id.tolist(), result.score.tolist(), strict=True
        ):
            assert (class_id, round(score, 3)) == (stated.class_id, pytest.approx(stated.score, abs=1e-3))
            assert plain_iou(xyxy, stated) > 0.99
            assert np.abs(np.subtract(xyxy, stated[:4])).max() <= 1.0


def test_yolox_nano_with_the_wrong_preprocessing_loses_score(shared_dir: Path) -> None:
    """The card's colour order matters: the comparison above would notice a wrong one."""
    network = session(shared_dir / "models" / "yolox_nano.onnx")
    photo = (shared_dir / "media" / "chelsea.jpg").read_bytes()
    as_rgb = card_of_model(network, 1, {**PARAMETERS, "model-color-format": "0"})
    scores = [ours(network, card, [photo])[0].score.max(initial=0) for card in (as_rgb, card_of_model(network, 1))]
    assert abs(scores[0] - scores[1]) > 0.01
