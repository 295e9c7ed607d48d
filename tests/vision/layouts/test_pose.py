"""Poses: keypoints at known places, in the photo's pixels."""

from typing import Any

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed
from penstock.protocol.vision_results import Detections
from penstock.vision.spec import ResizeMode
from tests.support.plain_detections import PlainBox, PlainFit, assert_same_detections, corner, letterbox, squash
from tests.vision.layouts.decoding import FITS, Array, decoded, fitted

PLAIN_FITS = {ResizeMode.STRETCH: squash, ResizeMode.PAD_SYMMETRIC: letterbox, ResizeMode.PAD_RIGHT_BOTTOM: corner}
SIZES = [((640, 480), (320, 320)), ((1919, 1081), (320, 256)), ((150, 231), (256, 320))]
SHAPES = [(17, 3), (17, 2), (5, 3), (1, 2), (21, 3)]


def persons(width: int, height: int) -> list[PlainBox]:
    """The second is suppressed by the first; the last reaches beyond the photo."""
    return [
        PlainBox(0.10 * width, 0.2 * height, 0.4 * width, 0.9 * height, 0, 0.91),
        PlainBox(0.11 * width, 0.2 * height, 0.4 * width, 0.9 * height, 0, 0.45),
        PlainBox(0.50 * width, 0.1 * height, 0.7 * width, 0.6 * height, 1, 0.77),
        PlainBox(0.85 * width, 0.7 * height, 1.1 * width, 1.2 * height, 0, 0.33),
    ]


def points_of(boxes: list[PlainBox], shape: tuple[int, int], seed: int = 0) -> Array:
    """(boxes, k, 3): x, y and visibility, at random places in and around the boxes."""
    random = np.random.default_rng(seed)
    corners = np.array([box[:4] for box in boxes])[:, np.newaxis]
    share = random.uniform(-0.1, 1.1, (len(boxes), shape[0], 2))
    places = corners[..., :2] + share * (corners[..., 2:] - corners[..., :2])
    visibility = (
        random.uniform(0, 1, (len(boxes), shape[0], 1)) if shape[1] == 3 else np.ones((len(boxes), shape[0], 1))
    )
    return np.concatenate([places, visibility], axis=2)


def keypoint_columns(points: Array, fit: PlainFit, values: int) -> Array:
    """(boxes, k * values) in the network's pixels."""
    placed = points.copy()
    placed[..., 0] = points[..., 0] * fit.resized_width / fit.width + fit.left
    placed[..., 1] = points[..., 1] * fit.resized_height / fit.height + fit.top
    return placed[..., :values].reshape(len(points), -1)


def anchor_rows(boxes: list[PlainBox], points: Array, fit: PlainFit, values: int, classes: int = 2) -> Array:
    """(n, 4 + classes + k * values), the boxes among rows of low scores."""
    width, height = fit.network_width, fit.network_height
    count = sum((width // side) * (height // side) for side in (8, 16, 32))
    random = np.random.default_rng(3)
    keypoints = keypoint_columns(points, fit, values)
    rows = random.uniform(0, 0.2, (count, 4 + classes + keypoints.shape[1])).astype(np.float32)
    places = random.permutation(count)[: len(boxes)]
    for place, box, own in zip(places, boxes, keypoints, strict=True):
        x0, y0, x1, y1, class_id, score = fit.to_network(box)
        rows[place, :4] = (x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0
        rows[place, 4 + class_id] = score
        rows[place, 4 + classes :] = own
    return rows


def final_rows(boxes: list[PlainBox], points: Array, fit: PlainFit, values: int) -> Array:
    """(n, 6 + k * values) by falling score, and rows that fill up."""
    placed = [fit.to_network(box) for box in boxes]
    head = np.array([[*box[:4], box.score, box.class_id] for box in placed])
    rows = np.hstack([head, keypoint_columns(points, fit, values)]).astype(np.float32)
    return np.vstack([rows, np.zeros((9, rows.shape[1]), np.float32)])


def clipped(boxes: list[PlainBox], width: int, height: int) -> list[PlainBox]:
    return [box._replace(x1=min(box.x1, width), y1=min(box.y1, height)) for box in boxes]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(("source", "network"), SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_keypoints_are_at_their_known_places_in_the_photo(
    shape: tuple[int, int], source: tuple[int, int], network: tuple[int, int], fit: ResizeMode
) -> None:
    """Within a pixel and cut at the photo's edge, in both axis orders; without a visibility, the score is 1."""
    boxes, plain_fit, geometry = persons(*source), PLAIN_FITS[fit](*source, *network), fitted(source, network, fit)
    points = points_of(boxes, shape)
    rows = anchor_rows(boxes, points, plain_fit, shape[1])
    remaining = [0, 2, 3]
    wanted = points[remaining]
    wanted[..., :2] = np.clip(wanted[..., :2], 0, source)
    for array in (rows, np.ascontiguousarray(rows.T)):
        found = decoded(Detections, "yolov8-pose", (array,), geometry, keypoint_shape=shape)
        assert_same_detections(found, clipped([boxes[index] for index in remaining], *source))
        assert_keypoints(found, wanted)
    final = final_rows([boxes[index] for index in remaining], points[remaining], plain_fit, shape[1])
    found = decoded(Detections, "yolo-end2end-pose", (final,), geometry, keypoint_shape=shape)
    assert_same_detections(found, clipped([boxes[index] for index in remaining], *source))
    assert_keypoints(found, wanted)
    rtmo = {"dets": final[:, :5], "keypoints": final[:, 6:].reshape(-1, *shape)}
    found = decoded(Detections, "rtmo", tuple(rtmo.values()), geometry, keypoint_shape=shape)
    assert_same_detections(found, [box._replace(class_id=0) for box in clipped([boxes[i] for i in remaining], *source)])
    assert_keypoints(found, wanted)


def assert_keypoints(found: Detections, wanted: Array) -> None:
    assert found.keypoints is not None
    assert (found.keypoints.shape, found.keypoints.dtype) == (wanted.shape, np.float32)
    assert np.abs(found.keypoints[..., :2] - wanted[..., :2]).max() < 0.05
    assert np.abs(found.keypoints[..., 2] - wanted[..., 2]).max() < 1e-6


def test_one_class_with_seventeen_keypoints_has_56_columns() -> None:
    """The usual pose model; a batch gives each picture its own keypoints."""
    source, network = (640, 480), (256, 256)
    boxes = [box._replace(class_id=0) for box in persons(*source)[::2]]
    plain_fit = letterbox(*source, *network)
    points = [points_of(boxes, (17, 3), seed) for seed in (1, 2)]
    batch = np.stack([anchor_rows(boxes, own, plain_fit, 3, classes=1).T for own in points])
    assert batch.shape[1] == 56
    for row, own in enumerate(points):
        options: dict[str, Any] = {"keypoint_shape": (17, 3)}
        found = decoded(Detections, "yolov8-pose", (batch,), fitted(source, network), row, **options)
        own[..., :2] = np.clip(own[..., :2], 0, source)
        assert_keypoints(found, own)


@pytest.mark.parametrize(
    ("layout", "columns", "shape", "what"),
    [
        ("yolov8-pose", 56, (0, 3), "keypoint-shape"),
        ("yolov8-pose", 55, (17, 3), "17 keypoints of 3 values"),
        ("yolov8-pose", 56, (26, 2), "26 keypoints of 2 values"),
        ("yolo-end2end-pose", 56, (17, 3), "[n, 57]"),
        ("yolo-end2end-pose", 57, (17, 2), "[n, 40]"),
        ("yolo-end2end-pose", 57, (0, 3), "keypoint-shape"),
    ],
)
def test_columns_that_do_not_fit_the_keypoints_are_refused(
    layout: str, columns: int, shape: tuple[int, int], what: str
) -> None:
    """The error says what was expected, and from which parameter."""
    with pytest.raises(EngineFailed) as failed:
        decoded(
            Detections, layout, (np.zeros((84, columns), np.float32),), fitted((9, 9), (64, 64)), keypoint_shape=shape
        )
    assert what in str(failed.value)


@pytest.mark.parametrize("value", [3e38, -3e38, 1e20])
def test_huge_keypoints_stay_in_the_photo(value: float) -> None:
    """Scores are in 0 to 1; there is no warning."""
    rows = np.random.default_rng(1).choice(np.array([value, 0.5, 30], np.float32), (84, 4 + 1 + 6))
    for layout, array in (("yolov8-pose", rows), ("yolo-end2end-pose", np.insert(rows, 5, 0, axis=1))):
        found = decoded(Detections, layout, (array,), fitted((100, 80), (64, 64)), keypoint_shape=(2, 3))
        assert found.keypoints is not None
        assert (found.keypoints >= 0).all()
        assert (found.keypoints <= (100, 80, 1)).all()


def test_no_person_has_no_keypoints() -> None:
    """The shape stays."""
    found = decoded(
        Detections, "yolov8-pose", (np.zeros((84, 56), np.float32),), fitted((9, 9), (64, 64)), keypoint_shape=(17, 3)
    )
    assert found.keypoints is not None
    assert found.keypoints.shape == (0, 17, 3)
