"""FastestDet on real frames: our way from JPEG to boxes equals plain onnxruntime with the documented decoding."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype, InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Detections
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import decode
from penstock.vision.preprocess import prepare
from penstock.vision.results import parse
from tests.vision import images
from tests.vision.test_parsers import overlap

THRESHOLD, IOU_THRESHOLD = 0.3, 0.45
Grid = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Box:
    xyxy: tuple[float, float, float, float]
    score: float
    class_id: int


@pytest.fixture(scope="module")
def session(shared_dir: Path) -> Any:
    """Plain onnxruntime, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(shared_dir / "models" / "FastestDet.onnx"), options)


@pytest.fixture(scope="module")
def frames(shared_dir: Path) -> list[npt.NDArray[np.uint8]]:
    """Five frames of pedestrians, (576, 768, 3) BGR."""

    def every_150th() -> Iterator[npt.NDArray[np.uint8]]:
        capture = cv2.VideoCapture(str(shared_dir / "media" / "vtest.avi"))
        for number in range(601):
            assert capture.grab()
            if number % 150 == 0:
                yield capture.retrieve()[1]

    return list(every_150th())


def fastestdet_card(max_batch_size: int = 0) -> VisionCard:
    parameters = {
        "network-type": "0",
        "model-color-format": "1",
        "net-scale-factor": repr(1 / 255),
        "parse-bbox-func-name": "fastestdet",
        "pre-cluster-threshold": str(THRESHOLD),
        "nms-iou-threshold": str(IOU_THRESHOLD),
    }
    shape = (1, 3, 352, 352) if max_batch_size == 0 else (3, 352, 352)
    spec = TensorSpec("input.1", Datatype.FP32, shape)
    outputs = (TensorSpec("758", Datatype.FP32, (85, 22, 22)),)
    card = card_from_config(ModelConfig("fastestdet", "onnxruntime", max_batch_size, (spec,), outputs, parameters))
    assert card is not None
    return card


def plain_network_input(bgr: npt.NDArray[np.uint8]) -> Grid:
    resized = cv2.resize(bgr, (352, 352), interpolation=cv2.INTER_LINEAR)
    return np.ascontiguousarray((resized.astype(np.float32) / 255).transpose(2, 0, 1)[np.newaxis])


def plain_boxes(grid: Grid, width: int, height: int) -> list[Box]:
    """The documentation, cell by cell, in Python's own floats."""
    _, rows, columns = grid.shape
    candidates = []
    for row in range(rows):
        for column in range(columns):
            cell = [float(value) for value in grid[:, row, column]]
            class_id = max(range(80), key=lambda index: cell[5 + index])
            score = cell[0] ** 0.6 * cell[5 + class_id] ** 0.4
            if score <= THRESHOLD:
                continue
            centre_x = (column + math.tanh(cell[1])) / columns * width
            centre_y = (row + math.tanh(cell[2])) / rows * height
            box_width, box_height = width / (1 + math.exp(-cell[3])), height / (1 + math.exp(-cell[4]))
            left, top = centre_x - box_width / 2, centre_y - box_height / 2
            candidates.append(Box((left, top, left + box_width, top + box_height), score, class_id))
    kept: list[Box] = []
    for box in sorted(candidates, key=lambda candidate: -candidate.score):
        if all(box.class_id != other.class_id or overlap(box.xyxy, other.xyxy) <= IOU_THRESHOLD for other in kept):
            kept.append(box)
    return [clipped(box, width, height) for box in kept]


def clipped(box: Box, width: int, height: int) -> Box:
    left, top, right, bottom = box.xyxy
    return Box((max(left, 0), max(top, 0), min(right, width), min(bottom, height)), box.score, box.class_id)


def assert_same(result: Detections, expected: list[Box]) -> None:
    assert len(result.score) == len(expected)
    for index, box in enumerate(expected):
        assert overlap(tuple(result.xyxy[index].tolist()), box.xyxy) >= 0.99
        assert abs(float(result.score[index]) - box.score) <= 1e-3
        assert int(result.class_id[index]) == box.class_id


def test_fastestdet_on_real_frames_equals_plain_onnxruntime(session: Any, frames: list[npt.NDArray[np.uint8]]) -> None:
    """JPEG → decode → resize → network → boxes: IoU ≥ 0.99, scores within 1e-3, the same classes, people among them."""
    card = fastestdet_card()
    seen = 0
    for frame in frames:
        encoded = images.jpeg(frame[..., ::-1])
        bgr = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
        expected = plain_boxes(session.run(None, {"input.1": plain_network_input(bgr)})[0][0], 768, 576)
        array, geometry = prepare(decode(encoded, card.prepare_spec.color), card.prepare_spec)
        grid = session.run(None, {card.input_name: array[np.newaxis]})[0]
        result = parse(card, InferResponse("fastestdet", "1", (tensor_from_numpy("758", grid),)), None, geometry)
        assert isinstance(result, Detections)
        assert_same(result, expected)
        seen += int(np.count_nonzero(result.class_id == 0))
    assert seen >= 3 * len(frames)


def test_fastestdet_row_of_a_batch_equals_the_image_alone(session: Any, frames: list[npt.NDArray[np.uint8]]) -> None:
    """Each image gets its own row, whatever else is in the batch."""
    card = fastestdet_card(max_batch_size=8)
    grids = [session.run(None, {"input.1": plain_network_input(frame)})[0] for frame in frames]
    _, geometry = prepare(decode(images.jpeg(frames[0]), card.prepare_spec.color), card.prepare_spec)
    batch = InferResponse("fastestdet", "1", (tensor_from_numpy("758", np.concatenate(grids)),))
    for row, grid in enumerate(grids):
        result = parse(card, batch, row, geometry)
        assert isinstance(result, Detections)
        assert_same(result, plain_boxes(grid[0], 768, 576))
