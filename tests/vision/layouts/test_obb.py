"""Oriented boxes: known ones at every angle, their exact overlap, and their suppression."""

import math

import cv2
import numpy as np
import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.errors import EngineFailed, InvalidRequest
from penstock.protocol.inference import Datatype
from penstock.protocol.vision_results import Detections
from penstock.vision.card import card_from_config
from penstock.vision.layouts.oriented_boxes import rotated_iou, rotated_nms
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import ResizeMode
from tests.vision.layouts.decoding import LETTERBOXES, Array, decoded, fitted

SIZES = [((640, 480), (320, 320)), ((1919, 1081), (320, 256)), ((150, 231), (256, 320)), ((2000, 60), (320, 320))]
CLASSES = 3


def corners_of(box: Array) -> list[tuple[float, float]]:
    """In order, with the picture's y downwards."""
    x, y, width, height, angle = box[:5].tolist()
    cosine, sine = math.cos(angle), math.sin(angle)
    halves = [(-width, -height), (width, -height), (width, height), (-width, height)]
    return [(x + (a * cosine - b * sine) / 2, y + (a * sine + b * cosine) / 2) for a, b in halves]


def plain_overlap(one: Array, other: Array) -> float:
    """Intersection over union of two oriented boxes: one's corners, cut by each side of the other in turn."""
    polygon, sides = corners_of(one), corners_of(other)
    for (x0, y0), (x1, y1) in zip(sides, sides[1:] + sides[:1], strict=True):
        depths = [(x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) for x, y in polygon]
        cut = []
        for index, (x, y) in enumerate(polygon):
            (last_x, last_y), depth, last = polygon[index - 1], depths[index], depths[index - 1]
            if (depth >= 0) != (last >= 0):
                part = last / (last - depth)
                cut.append((last_x + part * (x - last_x), last_y + part * (y - last_y)))
            if depth >= 0:
                cut.append((x, y))
        polygon = cut
    pairs = zip(polygon, polygon[1:] + polygon[:1], strict=True)
    shared = abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2
    return float(shared / (one[2] * one[3] + other[2] * other[3] - shared))


def opencv_overlap(one: Array, other: Array) -> float:
    """The same by OpenCV: degrees, float32. It finds none for some boxes that are the same but for rounding."""
    first, second = (
        ((float(box[0]), float(box[1])), (float(box[2]), float(box[3])), math.degrees(float(box[4])))
        for box in (one, other)
    )
    _, polygon = cv2.rotatedRectangleIntersection(first, second)
    shared = cv2.contourArea(cv2.convexHull(polygon)) if polygon is not None and len(polygon) > 2 else 0.0
    return float(shared / (one[2] * one[3] + other[2] * other[3] - shared))


def plain_suppression(boxes: Array, score: Array, group: Array, iou: float) -> list[int]:
    """Greedy, in a loop."""
    selected: list[int] = []
    for index in np.argsort(-score, kind="stable").tolist():
        rivals = [one for one in selected if group[one] == group[index]]
        if all(plain_overlap(boxes[one], boxes[index]) <= iou for one in rivals):
            selected.append(index)
    return selected


def drawn(box: Array, size: int = 1200) -> Array:
    """(size, size) bool: the pixels whose centre is in the box."""
    y, x = np.mgrid[:size, :size] + 0.5
    cosine, sine = math.cos(box[4]), math.sin(box[4])
    across = (x - box[0]) * cosine + (y - box[1]) * sine
    down = (y - box[1]) * cosine - (x - box[0]) * sine
    inside: Array = (np.abs(across) <= box[2] / 2) & (np.abs(down) <= box[3] / 2)
    return inside


def random_boxes(count: int, seed: int, spread: float = 100, longest: float = 120) -> Array:
    """(n, 5) with angles over several turns."""
    random = np.random.default_rng(seed)
    parts = (
        random.uniform(0, spread, (count, 2)),
        random.uniform(1, longest, (count, 2)),
        random.uniform(-7, 7, (count, 1)),
    )
    return np.hstack(parts)


def test_overlap_is_that_of_opencvs_polygons() -> None:
    """2,000 random pairs."""
    one, other = random_boxes(2000, 1), random_boxes(2000, 2)
    wanted = [opencv_overlap(first, second) for first, second in zip(one, other, strict=True)]
    assert np.abs(rotated_iou(one, other) - wanted).max() < 2e-4


def test_overlap_is_that_of_plain_polygons() -> None:
    """2,000 random pairs, among them pairs whose edges are parallel, at right angles, or the same."""
    one, other = random_boxes(2000, 1), random_boxes(2000, 2)
    other[1000:1200, 4] = one[1000:1200, 4]
    other[1200:1400, 4] = one[1200:1400, 4] + math.pi / 2
    other[1400:1500] = one[1400:1500]
    other[1500:1600, [0, 1, 4]] = one[1500:1600, [0, 1, 4]]
    wanted = [plain_overlap(first, second) for first, second in zip(one, other, strict=True)]
    assert np.abs(rotated_iou(one, other) - wanted).max() < 1e-6
    assert np.abs(rotated_iou(other, one) - rotated_iou(one, other)).max() < 1e-9
    assert rotated_iou(one, one) == pytest.approx(np.ones(2000), abs=1e-9)


def test_overlap_is_that_of_the_pixels() -> None:
    """Counted in a picture, which knows no geometry."""
    one = np.array([[600, 600, 700, 200, 0.3], [600, 600, 500, 500, 0.0], [500, 500, 300, 80, 2.0]])
    other = np.array([[650, 580, 600, 300, -0.9], [600, 600, 500, 500, math.pi / 4], [560, 620, 300, 80, 1.1]])
    for first, second, found in zip(one, other, rotated_iou(one, other), strict=True):
        bits = drawn(first), drawn(second)
        assert found == pytest.approx(
            np.count_nonzero(bits[0] & bits[1]) / np.count_nonzero(bits[0] | bits[1]), abs=2e-3
        )


def test_overlap_of_boxes_far_apart_and_of_slivers_is_no_warning() -> None:
    """0 to 1, whatever the size."""
    sizes = np.array([1e-40, 1e-3, 1.0, 1e6])
    width, height, other_width, angle = (part.ravel() for part in np.meshgrid(sizes, sizes, sizes, [0, 1e-9, 1.0]))
    one = np.stack([width * 0, width * 0, width, height, angle * 0], axis=1)
    other = np.stack([width * 0 + 0.3, width * 0, other_width, height, angle], axis=1)
    found = rotated_iou(one, other)
    assert ((found >= 0) & (found <= 1 + 1e-6)).all()
    other[:, 0] += 5e6
    assert rotated_iou(one, other).max() == 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("iou", [0.1, 0.45, 0.7])
def test_suppression_is_that_of_a_plain_loop(seed: int, iou: float) -> None:
    """Over random boxes of several classes."""
    boxes = random_boxes(120, seed, spread=200)
    random = np.random.default_rng(seed)
    score, group = random.permutation(120).astype(np.float32) / 120, random.integers(0, 3, 120)
    assert rotated_nms(boxes, score, group, iou).tolist() == plain_suppression(boxes, score, group, iou)


def test_suppression_leaves_out_empty_boxes_and_separates_groups() -> None:
    """Ties go to the first box; a class far from 0 is a class of its own."""
    box = [50, 50, 40, 10, 0.5]
    boxes = np.array([box, box, [50, 50, 0, 10, 0], [50, 50, 10, -1, 0], box])
    score, group = np.full(5, 0.5, np.float32), np.array([0, 0, 1, 2, 2**31])
    assert rotated_nms(boxes, score, group, 0.45).tolist() == [0, 4]


# layouts --------------------------------------------------------------------------------------------------------------


def turned_by(degrees: float, width: int, height: int) -> Array:
    """(n, 7): cxcywh and angle in the photo, class, score. The second is suppressed by the first, not the third."""
    side, angle = min(width, height), math.radians(degrees)
    return np.array(
        [
            [0.30 * width, 0.4 * height, 0.40 * side, 0.1 * side, angle, 1, 0.9],
            [0.30 * width, 0.4 * height, 0.42 * side, 0.1 * side, angle + 0.05, 1, 0.6],
            [0.30 * width, 0.4 * height, 0.40 * side, 0.1 * side, angle + math.pi / 2, 1, 0.8],
            [0.30 * width, 0.4 * height, 0.40 * side, 0.1 * side, angle, 2, 0.7],
            [0.98 * width, 0.9 * height, 0.30 * side, 0.2 * side, angle, 0, 0.5],
        ]
    )


def network_boxes(boxes: Array, geometry: Geometry) -> Array:
    """(n, 5) in the network's pixels, with angles in the range of the exporter.

    A letterbox rounds its sides: both scales differ a little. The width's side is placed exactly.
    """
    scale, placed = np.array([geometry.scale_x, geometry.scale_y]), boxes[:, :5].copy()
    placed[:, :2] = boxes[:, :2] * scale + (geometry.pad_x, geometry.pad_y)
    across = np.stack([np.cos(boxes[:, 4]), np.sin(boxes[:, 4])], axis=1) * scale
    down = np.stack([-np.sin(boxes[:, 4]), np.cos(boxes[:, 4])], axis=1) * scale
    placed[:, 2] *= np.hypot(*across.T)
    placed[:, 3] *= np.hypot(*down.T)
    placed[:, 4] = (np.arctan2(across[:, 1], across[:, 0]) + math.pi / 4) % math.pi - math.pi / 4
    return placed


def anchor_rows(boxes: Array, geometry: Geometry) -> Array:
    """(n, 4 + classes + 1): the boxes among rows of low scores."""
    width, height = geometry.network_width, geometry.network_height
    count = sum((width // side) * (height // side) for side in (8, 16, 32))
    random = np.random.default_rng(3)
    rows = random.uniform(0, 0.2, (count, 4 + CLASSES + 1)).astype(np.float32)
    rows[:, :4] *= 300
    places = random.permutation(count)[: len(boxes)]
    placed = network_boxes(boxes, geometry)
    rows[places, :4], rows[places, -1] = placed[:, :4], placed[:, 4]
    rows[places, 4 + boxes[:, 5].astype(int)] = boxes[:, 6]
    return rows


def final_rows(boxes: Array, geometry: Geometry, turns: int) -> Array:
    """(n, 7) of the boxes, whose angles have any number of half turns more."""
    placed = network_boxes(boxes, geometry)
    columns = placed[:, :4], boxes[:, 6:], boxes[:, 5:6], placed[:, 4:] + turns * math.pi
    rows = np.hstack(columns).astype(np.float32)
    return np.vstack([rows, np.zeros((9, 7), np.float32)])


def assert_turned(found: Detections, wanted: Array) -> None:
    """By falling score: class, score, and an overlap of 0.99 or more; xyxy encloses xywhr within the photo."""
    assert found.xywhr is not None
    assert (found.xywhr.shape, found.xywhr.dtype) == ((len(wanted), 5), np.float32)
    assert found.class_id.tolist() == wanted[:, 5].tolist()
    assert found.score == pytest.approx(wanted[:, 6], abs=1e-3)
    for one, box in zip(found.xywhr, wanted, strict=True):
        assert plain_overlap(one, box) >= 0.99
        turn = (float(one[4]) - box[4] + math.pi / 2) % math.pi - math.pi / 2
        assert abs(turn) < 0.01
        assert -math.pi / 4 - 1e-5 <= one[4] <= 3 * math.pi / 4 + 1e-5


@pytest.mark.parametrize("fit", LETTERBOXES)
@pytest.mark.parametrize(("source", "network"), SIZES[:3])
@pytest.mark.parametrize("degrees", [*range(-45, 136, 15), -44.9, 134.9, 89.9, 90.1, 0.1])
def test_turned_boxes_are_the_known_ones(
    degrees: float, source: tuple[int, int], network: tuple[int, int], fit: ResizeMode
) -> None:
    """At angles over the whole range and at its ends, in both axis orders; one box of a class suppresses another."""
    geometry, boxes = fitted(source, network, fit), turned_by(degrees, *source)
    rows = anchor_rows(boxes, geometry)
    wanted = boxes[[0, 2, 3, 4]]
    for array in (rows, np.ascontiguousarray(rows.T)):
        found = decoded(Detections, "yolov8-obb", (array,), geometry)
        assert_turned(found, wanted)
        assert_enclosed(found, wanted, source)
    for turns in (0, -3, 8):
        assert_turned(decoded(Detections, "yolo-end2end-obb", (final_rows(wanted, geometry, turns),), geometry), wanted)


def assert_enclosed(found: Detections, wanted: Array, source: tuple[int, int]) -> None:
    """xyxy: the least and the greatest corner, cut at the photo's edge."""
    for one, box in zip(found.xyxy, wanted, strict=True):
        corners = cv2.boxPoints(((box[0], box[1]), (box[2], box[3]), math.degrees(box[4])))
        low, high = np.clip(corners.min(axis=0), 0, source), np.clip(corners.max(axis=0), 0, source)
        assert one == pytest.approx([*low, *high], abs=max(source) * 0.005)


def test_long_photo_keeps_its_boxes_though_a_letterbox_rounds_its_height() -> None:
    """60 rows become 10 of 9.6."""
    geometry = fitted(*SIZES[3])
    boxes = np.array([[1000, 30, 400, 30, 0.0, 1, 0.9]])
    found = decoded(Detections, "yolov8-obb", (anchor_rows(boxes, geometry),), geometry)
    assert found.xywhr is not None
    assert found.xywhr[0] == pytest.approx([1000, 30, 400, 30, 0], abs=2)


def test_batch_gives_each_picture_its_turned_boxes() -> None:
    """Both layouts."""
    geometry = fitted((640, 480), (320, 320))
    pictures = [turned_by(degrees, 640, 480)[:1] for degrees in (20, 110)]
    anchors = np.stack([anchor_rows(boxes, geometry) for boxes in pictures])
    final = np.stack([final_rows(boxes, geometry, 0) for boxes in pictures])
    for row, boxes in enumerate(pictures):
        assert_turned(decoded(Detections, "yolov8-obb", (anchors,), geometry, row), boxes)
        assert_turned(decoded(Detections, "yolo-end2end-obb", (final,), geometry, row), boxes)


def test_class_agnostic_suppression_compares_boxes_of_all_classes() -> None:
    """The box of another class at the same place is dropped."""
    geometry = fitted((640, 480), (320, 320))
    boxes = turned_by(30, 640, 480)
    found = decoded(Detections, "yolov8-obb", (anchor_rows(boxes, geometry),), geometry, is_class_agnostic=True)
    assert_turned(found, boxes[[0, 2, 4]])


def test_card_that_stretches_pictures_is_refused() -> None:
    """The error names the parameter; with maintain-aspect-ratio the card is made."""
    inputs, outputs = (TensorSpec("images", Datatype.FP32, (3, 64, 64)),), (TensorSpec("a", Datatype.FP32, (8, 84)),)
    parameters = {"network-type": "0", "layout": "yolov8-obb"}
    with pytest.raises(InvalidRequest, match="'maintain-aspect-ratio' must be 1 with layout yolov8-obb"):
        card_from_config(ModelConfig("ships", "onnxruntime", 0, inputs, outputs, parameters))
    good = {**parameters, "maintain-aspect-ratio": "1"}
    assert card_from_config(ModelConfig("ships", "onnxruntime", 0, inputs, outputs, good)) is not None


def test_picture_that_was_stretched_is_refused() -> None:
    """A user's own preprocessing: the error names the picture's size."""
    geometry = fitted((640, 320), (64, 64), ResizeMode.STRETCH)
    with pytest.raises(EngineFailed, match="640x320 was stretched to 64x64"):
        decoded(Detections, "yolov8-obb", (np.zeros((8, 84), np.float32),), geometry)


@pytest.mark.parametrize(
    ("layout", "shape", "what"), [("yolov8-obb", (5, 84), "classes"), ("yolo-end2end-obb", (84, 6), "[n, 7]")]
)
def test_columns_that_are_no_turned_boxes_are_refused(layout: str, shape: tuple[int, int], what: str) -> None:
    """The error says what was expected."""
    with pytest.raises(EngineFailed) as failed:
        decoded(Detections, layout, (np.zeros(shape, np.float32),), fitted((100, 80), (64, 64)))
    assert what in str(failed.value)


@pytest.mark.parametrize("value", [3e38, -3e38, 1e20])
def test_huge_turned_boxes_are_no_overflow(value: float) -> None:
    """Enclosing boxes stay in the photo; there is no warning."""
    rows = np.random.default_rng(1).choice(np.array([value, 0.5, 30, 0], np.float32), (84, 4 + 2 + 1))
    final = rows.copy()
    final[:, 5] = 0
    for layout, array in (("yolov8-obb", rows), ("yolo-end2end-obb", final)):
        found = decoded(Detections, layout, (array,), fitted((100, 80), (64, 64)))
        assert found.xywhr is not None
        assert np.isfinite(found.xywhr).all()
        assert (found.xyxy <= (100, 80, 100, 80)).all()
        assert (found.xyxy >= 0).all()


def test_a_thousand_overlapping_boxes_are_suppressed_in_bounded_time() -> None:
    """All on one place: the slowest case, some hundred thousand pairs."""
    boxes = random_boxes(1024, 5, spread=20, longest=60)
    score = np.linspace(0.9, 0.3, 1024, dtype=np.float32)
    selected = rotated_nms(boxes, score, np.zeros(1024, np.int64), 0.45)
    assert selected[:80].tolist() == plain_suppression(
        boxes[: selected[79] + 1], score[: selected[79] + 1], np.zeros(1024), 0.45
    )
