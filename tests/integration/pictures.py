"""Frames of the real street video, and the plain reference of FastestDet."""

from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]
FASTESTDET_SIDE = 352
GRID = 22


@lru_cache(maxsize=4)
def frames(video: Path, count: int = 5) -> tuple[Picture, ...]:
    """`count` frames spread over the video, BGR."""
    capture = cv2.VideoCapture(str(video))
    total = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    pictures = []
    for index in range(count):
        capture.set(cv2.CAP_PROP_POS_FRAMES, index * total // count)
        is_read, frame = capture.read()
        assert is_read
        pictures.append(np.asarray(frame, np.uint8))
    return tuple(pictures)


def jpeg(picture: Picture) -> bytes:
    is_written, encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 95])
    assert is_written
    return encoded.tobytes()


def fastestdet_input(picture: Picture) -> npt.NDArray[np.float32]:
    """(1, 3, 352, 352) float32 BGR/255, as its documentation says, bilinear without antialiasing."""
    resized = cv2.resize(picture, (FASTESTDET_SIDE, FASTESTDET_SIDE), interpolation=cv2.INTER_LINEAR)
    return np.ascontiguousarray(resized.astype(np.float32).transpose(2, 0, 1)[np.newaxis] / np.float32(255))


def fastestdet_boxes(
    output: npt.NDArray[np.float32], *, width: int, height: int, score_threshold: float, iou_threshold: float
) -> list[tuple[int, float, tuple[float, float, float, float]]]:
    """(class_id, score, xyxy) by plain loops over the grid, then greedy suppression within a class."""
    found = []
    grid = output.reshape(85, GRID, GRID).astype(np.float64)
    for row in range(GRID):
        for column in range(GRID):
            cell = grid[:, row, column]
            class_id = int(cell[5:].argmax())
            score = float(cell[0] ** 0.6 * cell[5 + class_id] ** 0.4)
            if score <= score_threshold:
                continue
            x, y = (column + np.tanh(cell[1])) / GRID, (row + np.tanh(cell[2])) / GRID
            w, h = 1 / (1 + np.exp(-cell[3])), 1 / (1 + np.exp(-cell[4]))
            box = ((x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height)
            x1, y1, x2, y2 = (float(v) for v in box)
            clipped = (max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height)))
            found.append((class_id, score, clipped))
    kept: list[tuple[int, float, tuple[float, float, float, float]]] = []
    for candidate in sorted(found, key=lambda item: -item[1]):
        if all(k[0] != candidate[0] or iou(k[2], candidate[2]) <= iou_threshold for k in kept):
            kept.append(candidate)
    return kept


def iou(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Intersection over union of two xyxy boxes."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    shared = width * height
    area_a, area_b = (a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1])
    return shared / (area_a + area_b - shared) if shared else 0.0
