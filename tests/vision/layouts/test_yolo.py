"""YOLO's anchor rows: known boxes come back, as by a plain decoding in loops; broken outputs are refused."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed
from penstock.vision.results import ResultOptions
from tests.support.plain_detections import PlainBox, PlainFit, assert_same_detections, plain_nms
from tests.vision.layouts.scenes import (
    CLASSES,
    LETTERBOX,
    STREET,
    STREET_SIZE,
    YARD,
    YARD_SIZE,
    Array,
    anchor_rows,
    card_of,
    cell_count,
    decode,
    fit_of,
)

SIZE = (320, 256)
KNOWN = plain_nms(STREET)  # what a decoding must find, but for clipping
SIZES = [(320, 256), (256, 320), (416, 416)]


def plain_rows(rows: Array, fit: PlainFit, *, has_objectness: bool, threshold: float = 0.25) -> list[PlainBox]:
    """Boxes (n, 4 or 5 + classes) of cxcywh in pixels, in the picture's pixels: row by row, then suppressed."""
    head, found = 5 if has_objectness else 4, []
    for row in rows.tolist():
        score = max(row[head:]) * (row[4] if has_objectness else 1.0)
        if score > threshold:
            (x, y, width, height), class_id = row[:4], row[head:].index(max(row[head:]))
            found.append(PlainBox(x - width / 2, y - height / 2, x + width / 2, y + height / 2, class_id, score))
    return [fit.to_picture(box) for box in plain_nms(found)]


def plain_yolox(rows: Array, fit: PlainFit, strides: Sequence[int]) -> list[PlainBox]:
    """Raw rows of YOLOX: cell by cell, the first grid's first row first."""
    decoded, place = rows.astype(np.float64), 0
    for stride in strides:
        for cell_y in range(fit.network_height // stride):
            for cell_x in range(fit.network_width // stride):
                x, y, width, height = rows[place, :4].tolist()
                decoded[place, :2] = (x + cell_x) * stride, (y + cell_y) * stride
                decoded[place, 2:4] = math.exp(width) * stride, math.exp(height) * stride
                place += 1
    assert place == len(rows)
    return plain_rows(decoded, fit, has_objectness=True)


def raw_of(rows: Array, fit: PlainFit, strides: Sequence[int]) -> Array:
    """Rows of pixels as YOLOX's raw ones."""
    raw, place = rows.copy(), 0
    for stride in strides:
        for cell_y in range(fit.network_height // stride):
            for cell_x in range(fit.network_width // stride):
                x, y, width, height = rows[place, :4].tolist()
                raw[place, :2] = x / stride - cell_x, y / stride - cell_y
                raw[place, 2:4] = math.log(width / stride), math.log(height / stride)
                place += 1
    return raw


def inside_street(boxes: Sequence[PlainBox], fit: PlainFit) -> list[PlainBox]:
    """The known boxes, clipped to the picture."""
    return [fit.to_picture(fit.to_network(box)) for box in boxes]


@pytest.mark.parametrize("is_transposed", [False, True], ids=["columns-first", "rows-first"])
@pytest.mark.parametrize("size", SIZES)
def test_yolov8_finds_the_known_boxes_in_both_axis_orders(size: tuple[int, int], is_transposed: bool) -> None:
    """As a plain decoding: several classes, suppression per class, letterbox, two pictures in a batch."""
    scenes = [(STREET, STREET_SIZE), (YARD, YARD_SIZE)]
    fits = [fit_of(picture, size) for _, picture in scenes]
    count = cell_count(size)
    rows = np.stack(
        [anchor_rows(boxes, fit, count, has_objectness=False) for (boxes, _), fit in zip(scenes, fits, strict=True)]
    )
    card = card_of("yolov8", size, ["output0"])
    outputs = {"output0": rows if is_transposed else rows.transpose(0, 2, 1)}
    for index, (boxes, picture) in enumerate(scenes):
        found = decode(card, outputs, picture, row=index)
        assert_same_detections(found, plain_rows(rows[index], fits[index], has_objectness=False))
        assert_same_detections(found, inside_street(plain_nms(boxes), fits[index]))


@pytest.mark.parametrize("strides", [(4, 8, 16, 32), (8, 16, 32, 64), (8, 16, 32)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_yolov8_tells_rows_by_the_sum_of_its_grids_even_if_classes_are_more(
    strides: tuple[int, ...], is_transposed: bool
) -> None:
    """A network of 64 x 128 pixels and 1000 classes has fewer rows than columns."""
    size = (64, 128)
    fit = fit_of(YARD_SIZE, size)
    rows = anchor_rows(YARD, fit, cell_count(size, strides), has_objectness=False, classes=1000)
    card = card_of("yolov8", size, ["output0"])
    found = decode(card, {"output0": rows if is_transposed else rows.T}, YARD_SIZE, row=None)
    assert_same_detections(found, inside_street(YARD, fit))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_yolov8_of_an_unknown_number_of_rows_takes_the_longer_axis(is_transposed: bool) -> None:
    """Such as a network that was cut, or has other strides."""
    fit = fit_of(STREET_SIZE, SIZE)
    rows = anchor_rows(STREET, fit, 1000, has_objectness=False)
    found = decode(card_of("yolov8", SIZE, ["o"]), {"o": rows if is_transposed else rows.T}, STREET_SIZE, row=None)
    assert_same_detections(found, inside_street(KNOWN, fit))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_yolov8_of_every_float_type_finds_the_known_boxes(dtype: type) -> None:
    """FP16 loses half a pixel in 1024: the boxes are compared with the rounded ones."""
    fit = fit_of(STREET_SIZE, SIZE)
    rows = anchor_rows(STREET, fit, cell_count(SIZE), has_objectness=False).astype(dtype)
    found = decode(card_of("yolov8", SIZE, ["o"]), {"o": rows.T[np.newaxis]}, STREET_SIZE)
    assert_same_detections(found, plain_rows(rows, fit, has_objectness=False))


@pytest.mark.parametrize(("layout", "has_objectness"), [("yolov8", False), ("yolov5", True)])
def test_apply_sigmoid_makes_scores_of_logits(layout: str, has_objectness: bool) -> None:
    """Of the classes and of the objectness."""
    fit = fit_of(STREET_SIZE, SIZE)
    rows = anchor_rows(STREET, fit, cell_count(SIZE), has_objectness=has_objectness)
    logits = rows.copy()
    logits[:, 4:] = np.log(rows[:, 4:] / (1 - rows[:, 4:]))
    card = card_of(layout, SIZE, ["o"], LETTERBOX | {"apply-sigmoid": "1"})
    found = decode(card, {"o": logits[np.newaxis]}, STREET_SIZE)
    assert_same_detections(found, plain_rows(rows, fit, has_objectness=has_objectness))


def test_apply_softmax_makes_scores_of_logits() -> None:
    """They are shared among the classes of a row."""
    fit = fit_of(YARD_SIZE, SIZE)
    logits = anchor_rows(YARD, fit, cell_count(SIZE), has_objectness=False)
    logits[:, 4:] *= 10
    powers = np.exp(logits[:, 4:].astype(np.float64))
    rows = np.hstack([logits[:, :4], powers / powers.sum(axis=1, keepdims=True)])
    card = card_of("yolov8", SIZE, ["o"], LETTERBOX | {"apply-softmax": "1", "pre-cluster-threshold": "0.8"})
    found = decode(card, {"o": logits[np.newaxis]}, YARD_SIZE)
    assert_same_detections(found, plain_rows(rows, fit, has_objectness=False, threshold=0.8))
    assert len(found.score) > 0


@pytest.mark.parametrize("anchors", [1, 3])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows-first", "columns-first"])
@pytest.mark.parametrize("size", SIZES)
def test_yolov5_finds_the_known_boxes_in_both_axis_orders(
    size: tuple[int, int], is_transposed: bool, anchors: int
) -> None:
    """One anchor a cell (YOLOv6, YOLOX with decoded boxes) or three (YOLOv5, YOLOv7); objectness times class."""
    fits = [fit_of(STREET_SIZE, size), fit_of(YARD_SIZE, size)]
    rows = np.stack(
        [
            anchor_rows(boxes, fit, anchors * cell_count(size), has_objectness=True)
            for boxes, fit in zip((STREET, YARD), fits, strict=True)
        ]
    )
    card = card_of("yolov5", size, ["output"])
    outputs = {"output": rows.transpose(0, 2, 1) if is_transposed else rows}
    for index, (boxes, picture) in enumerate([(STREET, STREET_SIZE), (YARD, YARD_SIZE)]):
        found = decode(card, outputs, picture, row=index)
        assert_same_detections(found, plain_rows(rows[index], fits[index], has_objectness=True))
        assert_same_detections(found, inside_street(plain_nms(boxes), fits[index]))


def test_yolov5_of_one_class_and_three_anchors_takes_the_objectness_alone() -> None:
    """YOLOv7 does not train the class of such models: it is 0.5 everywhere."""
    fit = fit_of(STREET_SIZE, SIZE)
    boxes = [box._replace(class_id=0) for box in STREET]
    rows = anchor_rows(boxes, fit, 3 * cell_count(SIZE), has_objectness=False, classes=1)
    with_class = np.hstack([rows, np.full((len(rows), 1), 0.5, np.float32)])
    found = decode(card_of("yolov5", SIZE, ["o"]), {"o": with_class[np.newaxis]}, STREET_SIZE)
    assert_same_detections(found, plain_rows(rows, fit, has_objectness=False))


def test_yolov5_of_one_class_and_one_anchor_takes_the_product() -> None:
    """YOLOv6 has an objectness of 1 everywhere; YOLOX trains both."""
    fit = fit_of(STREET_SIZE, SIZE)
    boxes = [box._replace(class_id=0) for box in STREET]
    rows = anchor_rows(boxes, fit, cell_count(SIZE), has_objectness=True, classes=1)
    found = decode(card_of("yolov5", SIZE, ["o"]), {"o": rows[np.newaxis]}, STREET_SIZE)
    assert_same_detections(found, plain_rows(rows, fit, has_objectness=True))
    rows[:, 4] = 1.0
    found = decode(card_of("yolov5", SIZE, ["o"]), {"o": rows[np.newaxis]}, STREET_SIZE)
    assert_same_detections(found, plain_rows(rows, fit, has_objectness=True))


@pytest.mark.parametrize("strides", [(8, 16, 32), (8, 16, 32, 64)])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_yolox_finds_the_known_boxes_of_raw_cells(
    size: tuple[int, int], is_transposed: bool, strides: tuple[int, ...]
) -> None:
    """Also of the larger models with a grid of 64 pixels, and of pictures that are not square."""
    fit = fit_of(STREET_SIZE, size)
    rows = raw_of(anchor_rows(STREET, fit, cell_count(size, strides), has_objectness=True), fit, strides)
    found = decode(card_of("yolox", size, ["output"]), {"output": rows.T if is_transposed else rows}, STREET_SIZE)
    assert_same_detections(found, plain_yolox(rows, fit, strides))
    assert_same_detections(found, inside_street(KNOWN, fit))


def test_yolox_with_rows_of_no_grid_is_refused() -> None:
    """The sentence has both numbers of rows that an input of this size can have."""
    with pytest.raises(EngineFailed, match=r"\[1681, 10\] for one image; 1680 or 1700 rows for an input of 320x256"):
        decode(card_of("yolox", SIZE, ["o"]), {"o": np.zeros((1, 1681, 10), np.float32)}, STREET_SIZE)


# options --------------------------------------------------------------------------------------------------------------


def found_with(
    layout: str = "yolov8", *, wanted: ResultOptions | None = None, **parameters: str
) -> list[tuple[int, float]]:
    """Class and score of STREET's detections with these parameters, underscores for hyphens."""
    words = {key.replace("_", "-"): value for key, value in parameters.items()}
    rows = anchor_rows(STREET, fit_of(STREET_SIZE, SIZE), cell_count(SIZE), has_objectness=layout != "yolov8")
    card = card_of(layout, SIZE, ["o"], LETTERBOX | words)
    result = decode(card, {"o": rows[np.newaxis]}, STREET_SIZE, wanted=wanted or ResultOptions())
    return [(class_id, round(float(score), 3)) for class_id, score in zip(result.class_id, result.score, strict=True)]


EVERY = [(2, 0.91), (1, 0.83), (0, 0.62), (4, 0.55), (3, 0.31)]


@pytest.mark.parametrize("layout", ["yolov8", "yolov5"])
def test_options_of_a_card_choose_among_the_boxes(layout: str) -> None:
    """Thresholds, also per class, suppression over classes, class ids, and the number of results."""
    assert found_with(layout) == EVERY
    assert found_with(layout, pre_cluster_threshold="0.6") == EVERY[:3]
    assert found_with(layout, nms_iou_threshold="0.95") == [EVERY[0], EVERY[1], (2, 0.74), *EVERY[2:]]
    assert found_with(layout, class_thresholds="2:0.95;3:0.3") == EVERY[1:]
    assert found_with(layout, pre_cluster_threshold="0.6", class_thresholds="3:0.3") == [*EVERY[:3], EVERY[4]]
    assert found_with(layout, class_agnostic_nms="1") == [EVERY[0], EVERY[1], *EVERY[3:]]
    assert found_with(layout, topk="2") == found_with(layout, max_detections="2") == EVERY[:2]
    assert found_with(layout, class_ids="7;9;90") == [(90, 0.91), (9, 0.83), (7, 0.62), (4, 0.55), (3, 0.31)]


def test_client_can_choose_classes_threshold_and_number() -> None:
    """A threshold below the card's works. Classes are the card's class ids."""
    assert found_with(wanted=ResultOptions(classes=("0", "4", "99"))) == [EVERY[2], EVERY[3]]
    assert found_with(class_ids="7;9;90", wanted=ResultOptions(classes=("90",))) == [(90, 0.91)]
    assert found_with(pre_cluster_threshold="0.9", wanted=ResultOptions(conf=0.3)) == EVERY
    assert found_with(wanted=ResultOptions(max_detections=1)) == EVERY[:1]


def test_chosen_class_is_found_among_thousands_of_stronger_boxes() -> None:
    """The limit of candidates counts only boxes of the chosen classes."""
    fit = fit_of(STREET_SIZE, (640, 640))
    rows = anchor_rows(STREET, fit, 8400, has_objectness=False)
    weak = (rows[:, 4:] > 0.25).any(axis=1)
    rows[~weak, 5] = 0.99  # class 1
    card = card_of("yolov8", (640, 640), ["o"])
    found = decode(card, {"o": rows[np.newaxis]}, STREET_SIZE, wanted=ResultOptions(classes=("3", "4")))
    assert_same_detections(found, inside_street([box for box in STREET if box.class_id in (3, 4)], fit))


# hostile values -------------------------------------------------------------------------------------------------------

LAYOUTS_OF_ROWS = [("yolov8", 4), ("yolov5", 5), ("yolox", 5)]


def hostile(layout: str, spoil: Callable[[Array], None]) -> list[float]:
    """Scores that STREET's rows give after `spoil` has changed them."""
    head = dict(LAYOUTS_OF_ROWS)[layout]
    rows = anchor_rows(STREET, fit_of(STREET_SIZE, SIZE), cell_count(SIZE), has_objectness=head == 5)
    spoil(rows)
    result = decode(card_of(layout, SIZE, ["o"]), {"o": rows[np.newaxis]}, STREET_SIZE)
    assert np.isfinite(result.xyxy).all()
    assert ((result.xyxy >= 0) & (result.xyxy <= [640, 360, 640, 360])).all()
    scores: list[float] = result.score.tolist()
    return scores


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 4, 7])
@pytest.mark.parametrize("layout", ["yolov8", "yolov5", "yolox"])
def test_values_that_are_not_finite_are_the_models_fault(layout: str, column: int, value: float) -> None:
    """In a box, an objectness or a score, of any row."""

    def spoil(rows: Array) -> None:
        rows[17, column] = value

    with pytest.raises(EngineFailed, match="model 'street' version 1: output 'o' has 1 values that are NaN or infinit"):
        hostile(layout, spoil)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [3e38, -3e38, 1e38, -1.0, 1e-45])
@pytest.mark.parametrize("columns", [slice(0, 4), slice(2, 4), slice(4, None), slice(0, None)])
@pytest.mark.parametrize("layout", ["yolov8", "yolov5", "yolox"])
def test_huge_and_negative_values_give_boxes_in_the_picture_and_no_warning(
    layout: str, columns: slice, value: float
) -> None:
    """Scores are at most 1, boxes are cut, sizes below 0 are no box."""

    def spoil(rows: Array) -> None:
        rows[:, columns] = value

    assert all(0 < score <= 1 for score in hostile(layout, spoil))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", ["yolov8", "yolov5", "yolox"])
def test_output_of_zeros_is_no_detection(layout: str) -> None:
    """As a network gives that was quantised badly."""
    assert hostile(layout, lambda rows: rows.fill(0)) == []


@pytest.mark.parametrize("layout", ["yolov8", "yolov5", "yolox"])
@pytest.mark.parametrize("shape", [(0, 84), (84, 0), (0, 0), (1680, 4), (1680, 1), (4, 1680), (1680, 0), (1, 1)])
def test_wrong_shapes_are_the_models_fault_or_empty(layout: str, shape: tuple[int, int]) -> None:
    """The sentence names the shape and what was expected."""
    with pytest.raises(EngineFailed, match=rf"shape \[{shape[0]}, {shape[1]}\] for one image; .* was expected"):
        decode(card_of(layout, SIZE, ["o"]), {"o": np.zeros((1, *shape), np.float32)}, STREET_SIZE)


@pytest.mark.parametrize("shape", [(1680,), (1, 1680, 9, 2), (2, 2, 1680, 9)])
def test_output_of_another_rank_is_the_models_fault(shape: tuple[int, ...]) -> None:
    """Such as the separate grids of YOLOv5."""
    with pytest.raises(EngineFailed, match="has no 2-D part"):
        decode(card_of("yolov5", SIZE, ["o"]), {"o": np.zeros(shape, np.float32)}, STREET_SIZE)


def test_classes_are_counted_from_zero_in_every_layout() -> None:
    """The scene has each of its classes."""
    assert {box.class_id for box in KNOWN} == set(range(CLASSES))
