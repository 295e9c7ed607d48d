"""Instance segmentation: masks of known discs and ellipses, against a plain two-step decoding."""

import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed, TooLarge
from penstock.protocol.vision_results import Detections
from penstock.vision.layouts.instance_masks import _MAX_MASK_PIXELS
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import ResizeMode
from tests.support.plain_detections import (
    PlainBox,
    PlainFit,
    assert_same_detections,
    corner,
    letterbox,
    plain_nms,
    squash,
)
from tests.vision.layouts.decoding import FITS, Array, decoded, fitted, mask_iou, whole

PLAIN_FITS = {ResizeMode.STRETCH: squash, ResizeMode.PAD_SYMMETRIC: letterbox, ResizeMode.PAD_RIGHT_BOTTOM: corner}
SIZES = [((640, 480), (320, 320)), ((1920, 1080), (320, 256)), ((150, 230), (256, 320)), ((3000, 40), (320, 320))]
PROTOTYPES, CLASSES = 32, 3


@dataclass(frozen=True, slots=True)
class Ellipse:
    """In parts of the picture's width and height. A box around it, and a class and score."""

    x: float
    y: float
    across: float  # half of its width
    down: float
    class_id: int
    score: float

    def box(self, width: int, height: int) -> PlainBox:
        x, y, across, down = self.x * width, self.y * height, self.across * width, self.down * height
        return PlainBox(x - across, y - down, x + across, y + down, self.class_id, self.score)

    def plane(self, fit: PlainFit, size: tuple[int, int]) -> Array:
        """(h, w) of the network's image: 1 in the middle, 0 at the edge."""
        x = (np.arange(size[0]) + 0.5) * fit.network_width / size[0]
        y = (np.arange(size[1]) + 0.5) * fit.network_height / size[1]
        to_x, to_y = fit.resized_width / fit.width, fit.resized_height / fit.height
        across = ((x - fit.left) / to_x / fit.width - self.x) / self.across
        down = ((y - fit.top) / to_y / fit.height - self.y) / self.down
        plane: Array = 1 - np.square(across)[np.newaxis] - np.square(down)[:, np.newaxis]
        return plane


SHAPES = (
    Ellipse(0.30, 0.35, 0.20, 0.25, 1, 0.93),
    Ellipse(0.32, 0.37, 0.20, 0.25, 1, 0.71),  # suppressed by the first one
    Ellipse(0.70, 0.60, 0.14, 0.30, 0, 0.80),
    Ellipse(0.98, 0.05, 0.15, 0.20, 2, 0.66),  # beyond the picture's corner
    Ellipse(0.50, 0.93, 0.45, 0.30, 2, 0.52),  # beyond the lower edge
)


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture with ellipses, as a network sees it: columns of coefficients by row, and prototypes that are mixed."""

    source: tuple[int, int]
    network: tuple[int, int]
    fit: ResizeMode
    shapes: Sequence[Ellipse] = SHAPES

    @property
    def geometry(self) -> Geometry:
        return fitted(self.source, self.network, self.fit)

    @property
    def plain_fit(self) -> PlainFit:
        return PLAIN_FITS[self.fit](*self.source, *self.network)

    @property
    def boxes(self) -> list[PlainBox]:
        return [shape.box(*self.source) for shape in self.shapes]

    def planes(self) -> Array:
        """(shapes, h, w): a map a shape, at a quarter of the network's size."""
        size = (self.network[0] // 4, self.network[1] // 4)
        return np.stack([shape.plane(self.plain_fit, size) for shape in self.shapes])

    def coefficients_and_prototypes(self) -> tuple[Array, Array]:
        """(shapes, m) and (m, h, w), whose products are the planes."""
        mix = np.linalg.qr(np.random.default_rng(2).normal(size=(PROTOTYPES, PROTOTYPES)))[0]
        planes = np.zeros((PROTOTYPES, *self.planes().shape[1:]))
        planes[: len(self.shapes)] = self.planes()
        prototypes = np.tensordot(mix.T, planes, axes=1)
        return mix[: len(self.shapes)].astype(np.float32), prototypes.astype(np.float32)

    def rows(self, head: int, per_cell: int = 1) -> Array:
        """(n, head + classes + m): the shapes' rows among rows of low scores."""
        count = per_cell * sum((self.network[0] // side) * (self.network[1] // side) for side in (8, 16, 32))
        random = np.random.default_rng(4)
        rows = random.uniform(0, 0.1, (count, head + CLASSES + PROTOTYPES)).astype(np.float32)
        rows[:, :4] = random.uniform(1, 200, (count, 4))
        places = random.permutation(count)[: len(self.shapes)]
        for place, box, own in zip(places, self.boxes, self.coefficients_and_prototypes()[0], strict=True):
            x0, y0, x1, y1, class_id, score = self.plain_fit.to_network(box)
            rows[place, :4] = (x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0
            rows[place, head + class_id] = score if head == 4 else score / 0.95
            if head == 5:
                rows[place, 4] = 0.95
            rows[place, -PROTOTYPES:] = own
        return rows

    def final_rows(self) -> Array:
        """(n, 6 + m): the shapes that are not suppressed, by falling score, and rows that only fill up."""
        kept = plain_nms(self.boxes)
        coefficients = self.coefficients_and_prototypes()[0]
        rows = np.zeros((len(kept) + 20, 6 + PROTOTYPES), np.float32)
        for row, box in zip(rows, kept, strict=False):
            row[:4], row[4:6] = self.plain_fit.to_network(box)[:4], (box.score, box.class_id)
            row[6:] = coefficients[self.boxes.index(box)]
        return rows

    def plain_masks(self) -> list[Array]:
        """Masks (height, width) bool of the boxes that remain: two resizes of the whole map, then cut and compared."""
        fit, found = self.plain_fit, []
        for box in plain_nms(self.boxes):
            logits = self.planes()[self.boxes.index(box)]
            logits = cv2.resize(logits, self.network, interpolation=cv2.INTER_LINEAR)
            logits = logits[fit.top : fit.top + fit.resized_height, fit.left : fit.left + fit.resized_width]
            logits = cv2.resize(logits, self.source, interpolation=cv2.INTER_LINEAR)
            x, y = np.arange(self.source[0]), np.arange(self.source[1])[:, np.newaxis]
            found.append((logits > 0) & (x >= box.x0) & (x < box.x1) & (y >= box.y0) & (y < box.y1))
        return found

    def clipped(self) -> list[PlainBox]:
        """The boxes that remain, cut at the picture's edge."""
        width, height = self.source
        return [
            box._replace(x0=max(box.x0, 0), y0=max(box.y0, 0), x1=min(box.x1, width), y1=min(box.y1, height))
            for box in plain_nms(self.boxes)
        ]


def outputs_of(layout: str, scene: Scene) -> tuple[Array, ...]:
    """Outputs without batch axis."""
    prototypes = scene.coefficients_and_prototypes()[1]
    if layout == "yolov5-seg":
        return scene.rows(5, per_cell=3), prototypes
    if layout == "yolo-end2end-seg":
        return scene.final_rows(), prototypes
    if layout == "yolov8-seg transposed":
        return scene.rows(4), prototypes
    return np.ascontiguousarray(scene.rows(4).T), prototypes


def assert_as_plain(found: Detections, scene: Scene) -> None:
    assert_same_detections(found, scene.clipped())
    assert found.masks is not None
    for mask, wanted in zip(found.masks, scene.plain_masks(), strict=True):
        assert (mask.width, mask.height) == scene.source
        assert mask_iou(whole(mask), wanted) >= 0.99


YOLO_LAYOUTS = ("yolov8-seg", "yolov8-seg transposed", "yolov5-seg", "yolo-end2end-seg")


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(("source", "network"), SIZES)
@pytest.mark.parametrize("layout", YOLO_LAYOUTS)
def test_masks_are_those_of_a_plain_decoding(
    layout: str, source: tuple[int, int], network: tuple[int, int], fit: ResizeMode
) -> None:
    """Boxes, classes, scores and masks: an overlap of 0.99 with two resizes of the whole map."""
    scene = Scene(source, network, fit)
    assert_as_plain(decoded(Detections, layout.split()[0], outputs_of(layout, scene), scene.geometry), scene)


@pytest.mark.parametrize("layout", ["yolov8-seg", "yolo-end2end-seg"])
def test_batch_gives_each_picture_its_own_masks(layout: str) -> None:
    """And prototypes may be named before the rows."""
    scenes = [Scene((200, 150), (128, 128), FITS[1], (shape,)) for shape in (SHAPES[0], SHAPES[2])]
    rows, prototypes = (np.stack(parts) for parts in zip(*(outputs_of(layout, one) for one in scenes), strict=True))
    for row, scene in enumerate(scenes):
        assert_as_plain(decoded(Detections, layout, (rows, prototypes), scene.geometry, row), scene)
        assert_as_plain(decoded(Detections, layout, (prototypes, rows), scene.geometry, row), scene)
    alone = (rows[:1], prototypes[:1])
    assert_as_plain(decoded(Detections, layout, alone, scenes[0].geometry, None), scenes[0])


@pytest.mark.parametrize("radius", [2, 3, 5, 9])
def test_masks_of_small_objects_are_exact_too(radius: int) -> None:
    """An object of a few pixels: resampling in one step would lose some of them."""
    shape = Ellipse(0.43, 0.37, radius / 640, radius / 480, 0, 0.9)
    scene = Scene((640, 480), (320, 320), ResizeMode.PAD_SYMMETRIC, (shape,))
    (wanted,) = scene.plain_masks()
    found = decoded(Detections, "yolov8-seg", outputs_of("yolov8-seg", scene), scene.geometry)
    assert found.masks is not None
    assert (whole(found.masks[0]) == wanted).all()


def test_random_masks_are_exact_but_for_equal_logits() -> None:
    """Noise as prototypes, and coefficients of any sign."""
    geometry = fitted((333, 222), (160, 96))
    random = np.random.default_rng(8)
    prototypes = random.normal(size=(4, 24, 40)).astype(np.float32)
    row = np.array([[0, 0, 160, 96, 0.9, 0, *random.normal(size=4)]], np.float32)
    logits = cv2.resize(np.tensordot(row[0, 6:], prototypes, axes=1), (160, 96))
    left, width, height = geometry.pad_x, round(333 * geometry.scale_x), round(222 * geometry.scale_y)
    logits = cv2.resize(logits[geometry.pad_y : geometry.pad_y + height, left : left + width], (333, 222))
    found = decoded(Detections, "yolo-end2end-seg", (row, prototypes), geometry)
    assert found.masks is not None
    is_clear = np.abs(logits) > 1e-4
    assert (whole(found.masks[0]) == (logits > 0))[is_clear].all()


@pytest.mark.parametrize(("threshold", "logit"), [(0.5, 0.0), (0.9, math.log(9)), (0.0, -math.inf), (1.0, math.inf)])
def test_threshold_of_masks_is_a_probability(threshold: float, logit: float) -> None:
    """0 takes the whole box, 1 nothing."""
    prototypes = np.linspace(-4, 4, 64, dtype=np.float32)[np.newaxis, np.newaxis].repeat(64, axis=1)
    rows = np.array([[8, 8, 56, 56, 0.9, 0, 1]], np.float32)
    geometry = fitted((64, 64), (64, 64))
    found = decoded(Detections, "yolo-end2end-seg", (rows, prototypes), geometry, segmentation_threshold=threshold)
    assert found.masks is not None
    columns = np.flatnonzero(whole(found.masks[0])[32])
    assert columns.tolist() == [column for column in range(8, 56) if prototypes[0, 0, column] > logit]


def test_no_masks_are_computed_if_the_client_wants_none() -> None:
    """Detections are the same without."""
    scene = Scene((640, 480), (320, 320), ResizeMode.PAD_SYMMETRIC)
    for layout in ("yolov8-seg", "yolov5-seg", "yolo-end2end-seg"):
        found = decoded(Detections, layout, outputs_of(layout, scene), scene.geometry, needs_masks=False)
        assert found.masks is None
        assert_same_detections(found, scene.clipped())


def test_at_most_max_detections_masks_are_computed() -> None:
    """Those of the best boxes."""
    scene = Scene((640, 480), (320, 320), ResizeMode.PAD_SYMMETRIC)
    found = decoded(Detections, "yolov8-seg", outputs_of("yolov8-seg", scene), scene.geometry, topk=2)
    assert found.masks is not None
    wanted = scene.plain_masks()[:2]
    assert [mask_iou(whole(mask), one) > 0.99 for mask, one in zip(found.masks, wanted, strict=True)] == [True, True]


def test_masks_of_a_large_photo_take_little_more_than_their_bits() -> None:
    """300 boxes of 100 x 100 and one of the whole photo, 3840 x 2160."""
    geometry = fitted((3840, 2160), (640, 640))
    random = np.random.default_rng(5)
    rows = np.zeros((301, 6 + 32), np.float32)
    rows[:, 4] = np.linspace(0.9, 0.4, 301)
    rows[:, :2] = random.uniform((0, 150), (600, 480), (301, 2))
    rows[:, 2:4] = rows[:, :2] + 17
    rows[0, :4] = 0, 140, 640, 500
    rows[:, 6:] = random.normal(size=(301, 32))
    prototypes = random.normal(size=(32, 160, 160)).astype(np.float32)
    tracemalloc.start()
    found = decoded(Detections, "yolo-end2end-seg", (rows, prototypes), geometry)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.masks is not None
    bits = sum(mask.bits.nbytes for mask in found.masks)
    assert (len(found.masks), bits > 8_000_000) == (301, True)
    assert peak < bits + (24 << 20)


def test_boxes_whose_masks_would_need_too_much_memory_are_refused() -> None:
    """300 boxes of a whole photo of 8 million pixels: 2.5 GB."""
    rows = np.zeros((300, 6 + 4), np.float32)
    rows[:, :6] = 0, 140, 640, 500, 0.9, 0
    arrays = (rows, np.ones((4, 160, 160), np.float32))
    geometry = fitted((3840, 2160), (640, 640))
    with pytest.raises(TooLarge) as failed:
        decoded(Detections, "yolo-end2end-seg", arrays, geometry)
    assert f"at most {_MAX_MASK_PIXELS}" in str(failed.value)
    assert "max-detections" in str(failed.value)
    assert len(decoded(Detections, "yolo-end2end-seg", arrays, geometry, topk=4).score) == 4


# rf-detr --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "network"), SIZES[:3])
@pytest.mark.parametrize("is_named", [True, False])
def test_masks_of_queries_are_resized_to_the_photo(
    source: tuple[int, int], network: tuple[int, int], *, is_named: bool
) -> None:
    """RF-DETR: boxes and labels as rf-detr; a mask's logits are resized in one step."""
    scene = Scene(source, network, ResizeMode.STRETCH, SHAPES[::2])
    boxes = [scene.plain_fit.to_network(box) for box in scene.boxes]
    rows = np.array([[(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0] for x0, y0, x1, y1, *_ in boxes])
    rows /= (*network, *network)
    logits = np.full((20, 3), -6.0, np.float32)
    for row, box in zip(logits, boxes, strict=False):
        row[box.class_id] = math.log(box.score / (1 - box.score))
    planes = np.full((20, network[1] // 4, network[0] // 4), -1, np.float32)
    planes[:3] = scene.planes()
    dets = np.full((20, 4), 0.1, np.float32)
    dets[:3] = rows
    named = {"labels": logits, "masks": planes, "dets": dets} if is_named else (dets, logits, planes)
    found = decoded(Detections, "rf-detr-seg", named, scene.geometry)
    assert_same_detections(found, scene.clipped())
    assert found.masks is not None
    for mask, box in zip(found.masks, scene.boxes, strict=True):
        wanted = cv2.resize(scene.planes()[scene.boxes.index(box)], source, interpolation=cv2.INTER_LINEAR) > 0
        assert mask_iou(whole(mask), wanted) >= 0.98
    assert decoded(Detections, "rf-detr-seg", named, scene.geometry, needs_masks=False).masks is None


# hostile outputs ------------------------------------------------------------------------------------------------------

ROWS, PLANES = np.zeros((38, 84), np.float32), np.zeros((32, 16, 16), np.float32)


@pytest.mark.parametrize(
    ("layout", "arrays", "what"),
    [
        ("yolov8-seg", (ROWS,), "needs a second output"),
        ("yolov8-seg", (ROWS, ROWS), "needs a second output"),
        ("yolov8-seg", (ROWS, PLANES[:0]), "within the network's input"),
        ("yolov8-seg", (ROWS, np.zeros((32, 70, 16), np.float32)), "within the network's input"),
        ("yolov8-seg", (ROWS[:36], PLANES), "classes"),
        ("yolov5-seg", (ROWS[:37].T, PLANES), "classes"),
        ("yolo-end2end-seg", (ROWS[:37].T, PLANES), "[n, 38]"),
        ("yolov8-seg", (ROWS, PLANES + np.nan), "NaN"),
        ("rf-detr-seg", (np.zeros((5, 4), np.float32), np.zeros((5, 3), np.float32), PLANES), "[5, h, w]"),
        ("rf-detr-seg", (np.zeros((5, 4), np.float32), np.zeros((5, 3), np.float32)), "masks"),
    ],
)
def test_outputs_of_another_form_are_refused_with_a_sentence(layout: str, arrays: tuple[Array, ...], what: str) -> None:
    """It names the output and what was expected."""
    with pytest.raises(EngineFailed) as failed:
        decoded(Detections, layout, arrays, fitted((100, 80), (64, 64)))
    assert what in str(failed.value)


@pytest.mark.parametrize("value", [1e38, -1e38, 3e38])
def test_huge_coefficients_and_prototypes_are_no_overflow(value: float) -> None:
    """Masks have some value, boxes are in the picture; there is no warning."""
    random = np.random.default_rng(0)
    rows = random.choice(np.array([value, -value, 0, 1, 30], np.float32), (84, 4 + 2 + 32))
    prototypes = random.choice(np.array([value, -value, 0, 1], np.float32), (32, 16, 16))
    for layout in ("yolov8-seg", "yolov5-seg"):
        found = decoded(Detections, layout, (rows, prototypes), fitted((100, 80), (64, 64)))
        assert found.masks is not None
        assert len(found.masks) == len(found.score)
        for mask in found.masks:
            whole(mask)


def test_outputs_without_an_object_have_no_masks() -> None:
    """No rows at all, and rows of low scores."""
    geometry = fitted((100, 80), (64, 64))
    for rows in (np.zeros((0, 38), np.float32), np.zeros((300, 38), np.float32)):
        found = decoded(Detections, "yolo-end2end-seg", (rows, PLANES), geometry)
        assert (found.masks, found.xyxy.shape) == ((), (0, 4))


def test_mask_of_huge_logits_has_their_sign() -> None:
    """Products and differences beyond float32 are bounded before they are computed."""
    prototypes = np.full((1, 64, 64), -3e38, np.float32)
    prototypes[:, :, :32] = 3e38
    rows = np.array([[0, 0, 64, 64, 0.9, 0, 3e38]], np.float32)
    found = decoded(Detections, "yolo-end2end-seg", (rows, prototypes), fitted((128, 128), (64, 64)))
    assert found.masks is not None
    assert (whole(found.masks[0]) == (np.arange(128) < 64)).all()
