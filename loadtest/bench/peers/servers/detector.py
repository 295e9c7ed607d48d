"""The vision that every peer shares, so that servers are compared and not detectors: JPEG to boxes, as ours does it.

It runs in the peers' environments: numpy, OpenCV and ONNX Runtime, nothing of ours. What the model wants comes as JSON
in PEER_MODEL. The steps are the gateway's own (server/vision), resize and table look-up included; only the JPEG decoder
is another build of libjpeg-turbo, OpenCV's.
"""

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import onnxruntime

Floats = npt.NDArray[np.float32]
Answer = dict[str, list[dict[str, object]]]
"""{"detections": [{"xyxy": four floats in the picture's pixels, "class_id", "label", "score"}, …]}"""
ENVIRONMENT_NAME = "PEER_MODEL"
_MOST_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Card:
    """What the model wants and answers. threads: intra-op, of each session. has_batch_axis: several pictures a run.

    keeps_aspect: the picture's proportions stay, padding is added at the right and the bottom. padding: a pixel value.
    """

    file: str
    input_name: str
    outputs: tuple[str, ...]
    width: int
    height: int
    is_bgr: bool
    keeps_aspect: bool
    scale: float
    parser: str
    score_threshold: float
    iou_threshold: float
    labels: tuple[str, ...]
    has_batch_axis: bool
    threads: int = 1
    padding: int = 0


def read_card() -> Card:
    """The card in the environment."""
    return Card(**json.loads(os.environ[ENVIRONMENT_NAME]))


@dataclass(frozen=True, slots=True)
class Prepared:
    """The network's input (3, H, W), the picture's size, and network pixels for one of the picture's, per axis."""

    array: Floats
    width: int
    height: int
    scale_x: float
    scale_y: float


class Detector:
    """One session of the model. Safe to use from several threads."""

    def __init__(self, card: Card) -> None:
        cv2.setNumThreads(1)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = card.threads
        self._card = card
        self._session = onnxruntime.InferenceSession(card.file, options, providers=["CPUExecutionProvider"])
        self._table = (card.scale * np.arange(256, dtype=np.float64)).astype(np.float32)

    def detect(self, jpeg: bytes) -> Answer:
        """The boxes of one picture."""
        return self.detect_many([jpeg])[0]

    def detect_many(self, jpegs: Sequence[bytes]) -> list[Answer]:
        """The boxes of each picture, which share one run of the network where it has a batch axis."""
        return self.infer([self.prepare(jpeg) for jpeg in jpegs])

    def prepare(self, jpeg: bytes) -> Prepared:
        """Decoded, resized, normalised. Raises ValueError for what is no picture."""
        card = self._card
        color = cv2.IMREAD_COLOR_BGR if card.is_bgr else cv2.IMREAD_COLOR_RGB
        pixels = cv2.imdecode(np.frombuffer(jpeg, np.uint8), color)
        if pixels is None:
            raise ValueError(f"{len(jpeg)} bytes that OpenCV cannot decode: send a JPEG")
        height, width = pixels.shape[:2]
        to_width, to_height = self._size(width, height)
        resized = pixels
        if (width, height) != (to_width, to_height):
            resized = cv2.resize(pixels, (to_width, to_height), interpolation=cv2.INTER_LINEAR)
        right, bottom = card.width - to_width, card.height - to_height
        if right or bottom:
            resized = cv2.copyMakeBorder(resized, 0, bottom, 0, right, cv2.BORDER_CONSTANT, value=[card.padding] * 3)
        array = np.empty((3, card.height, card.width), np.float32)
        for plane, channel in zip(array, cv2.split(resized), strict=True):
            cv2.LUT(channel, self._table, dst=plane)
        return Prepared(array, width, height, to_width / width, to_height / height)

    def infer(self, batch: Sequence[Prepared]) -> list[Answer]:
        """The boxes of each prepared picture."""
        if not self._card.has_batch_axis:
            return [self._parse(self._run(one.array[np.newaxis]), 0, one) for one in batch]
        outputs = self._run(np.stack([one.array for one in batch]))
        return [self._parse(outputs, row, one) for row, one in enumerate(batch)]

    def _size(self, width: int, height: int) -> tuple[int, int]:
        card = self._card
        if not card.keeps_aspect:
            return card.width, card.height
        scale = min(card.width / width, card.height / height)
        return max(int(width * scale), 1), max(int(height * scale), 1)

    def _run(self, images: Floats) -> list[Floats]:
        outputs: list[Floats] = self._session.run(list(self._card.outputs), {self._card.input_name: images})
        return outputs

    def _parse(self, outputs: Sequence[Floats], row: int, picture: Prepared) -> Answer:
        card = self._card
        rows = [output[row] for output in outputs]
        if card.parser == "yolox":
            xyxy, score, class_id = _yolox(rows, card.score_threshold, card.width, card.height)
        else:
            parse = _center_heatmap if card.parser == "center-heatmap" else _fastestdet
            xyxy, score, class_id = parse(rows, card.score_threshold)
        kept = _suppress(xyxy, score, class_id, card.iou_threshold)
        side = np.array([card.width / picture.scale_x, card.height / picture.scale_y] * 2)
        limit = np.array([picture.width, picture.height] * 2, np.float64)
        source = np.clip(xyxy[kept] * side, 0.0, limit)
        return {
            "detections": [
                {"xyxy": box.round(3).tolist(), "class_id": int(k), "label": self._label(int(k)), "score": float(s)}
                for box, s, k in zip(source, score[kept], class_id[kept], strict=True)
                if box[2] > box[0] and box[3] > box[1]
            ]
        }

    def _label(self, class_id: int) -> str:
        return self._card.labels[class_id] if class_id < len(self._card.labels) else ""


_Found = tuple[Floats, Floats, npt.NDArray[np.int64]]


def _center_heatmap(outputs: Sequence[Floats], threshold: float) -> _Found:
    """Boxes in fractions of the network's image, scores, classes."""
    heat, distances = outputs
    _, rows, columns = heat.shape
    score = (1 / (1 + np.exp(-np.maximum(heat, -60.0)))).astype(np.float32)
    padded = np.pad(heat, ((0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    tallest = np.maximum.reduce([padded[:, :rows], padded[:, 1 : rows + 1], padded[:, 2:]])
    tallest = np.maximum.reduce([tallest[..., :columns], tallest[..., 1 : columns + 1], tallest[..., 2:]])
    class_id, row, column = np.nonzero((score > threshold) & (heat >= tallest))
    reach = np.exp(np.clip(distances[:, row, column].astype(np.float64), -20.0, 20.0))
    middle = np.stack([column + 0.5, row + 0.5])
    xyxy = np.concatenate([middle - reach[:2], middle + reach[2:]]).T / np.array([columns, rows] * 2)
    return xyxy.astype(np.float32), score[class_id, row, column], class_id


def _fastestdet(outputs: Sequence[Floats], threshold: float) -> _Found:
    """Boxes in fractions of the network's image, scores, classes."""
    channels, rows, columns = outputs[0].shape
    cells = outputs[0].reshape(channels, rows * columns)
    class_id = cells[5:].argmax(axis=0)
    likelihood = np.take_along_axis(cells[5:], class_id[np.newaxis], axis=0)[0]
    score = np.clip(cells[0], 0.0, 1.0) ** 0.6 * np.clip(likelihood, 0.0, 1.0) ** 0.4
    hot = np.flatnonzero(score > threshold)
    offset, side = np.tanh(cells[1:3, hot].astype(np.float64)), 0.5 * (1 + np.tanh(0.5 * cells[3:5, hot]))
    centre = (np.stack([hot % columns, hot // columns]) + offset) / np.array([[columns], [rows]])
    xyxy = np.concatenate([centre - side / 2, centre + side / 2]).T.astype(np.float32)
    return xyxy, score[hot], class_id[hot]


def _yolox(outputs: Sequence[Floats], threshold: float, width: int, height: int) -> _Found:
    """Boxes in fractions of the network's image, scores, classes."""
    rows = outputs[0]
    best = rows[:, 5:].max(axis=1) * rows[:, 4]
    hot = np.flatnonzero(best > threshold)
    cells = _cells(width, height)[hot]
    centre, side = (rows[hot, :2] + cells[:, :2]) * cells[:, 2:], np.exp(rows[hot, 2:4]) * cells[:, 2:]
    xyxy = np.concatenate([centre - side / 2, centre + side / 2], axis=1) / np.array([width, height] * 2)
    return xyxy.astype(np.float32), best[hot], rows[hot, 5:].argmax(axis=1)


@functools.lru_cache(maxsize=4)
def _cells(width: int, height: int) -> Floats:
    """(n, 3): column, row and stride of YOLOX's cells."""
    grids = [np.indices((height // stride, width // stride)).reshape(2, -1)[::-1] for stride in (8, 16, 32)]
    strides = np.repeat((8, 16, 32), [grid.shape[1] for grid in grids])
    return np.vstack([np.hstack(grids), strides]).T.astype(np.float32)


def _suppress(
    xyxy: Floats, score: Floats, class_id: npt.NDArray[np.int64], iou_threshold: float
) -> npt.NDArray[np.int64]:
    """Indices of the boxes to keep, the best first: OpenCV's suppression by class, as ours."""
    order = np.argsort(-score, kind="stable")[:_MOST_CANDIDATES]
    boxes = xyxy[order].astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    boxes[:, :2] -= boxes[:, :2].min(axis=0, initial=0.0)
    suppress: Any = cv2.dnn.NMSBoxesBatched
    is_kept = suppress(boxes, score[order].astype(np.float32), class_id[order].astype(np.int32), 0.0, iou_threshold)
    return order[np.asarray(is_kept, np.int64).reshape(-1)]
