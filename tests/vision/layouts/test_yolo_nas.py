"""YOLO-NAS's outputs with and without NMS: known boxes come back; broken outputs are refused."""

from collections.abc import Mapping

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed, InvalidRequest
from penstock.vision.results import ResultOptions
from tests.support.plain_detections import PlainBox, assert_same_detections, plain_nms
from tests.vision.layouts.scenes import (
    CLASSES,
    LETTERBOX,
    STREET,
    STREET_SIZE,
    YARD,
    YARD_SIZE,
    Array,
    card_of,
    cell_count,
    corner_rows,
    decode,
    fit_of,
)

SIZE = (320, 256)
COUNT = cell_count(SIZE)
NAMES = ["boxes", "scores"]
BATCH_FORMAT = ["graph2_num_predictions", "graph2_pred_boxes", "graph2_pred_scores", "graph2_pred_classes"]


def clipped(boxes: list[PlainBox], size: tuple[int, int] = STREET_SIZE) -> list[PlainBox]:
    """Known boxes over the threshold as a decoding must find them."""
    fit = fit_of(size, SIZE)
    return [fit.to_picture(fit.to_network(box)) for box in boxes if box.score > 0.25]


def raw_outputs(boxes: tuple[PlainBox, ...], size: tuple[int, int], seed: int = 1) -> dict[str, Array]:
    """(n, 4) corners and (n, CLASSES) scores: the boxes in random rows, noise in the others."""
    random = np.random.default_rng(seed)
    corners = random.uniform(0, 120, (COUNT, 4)).astype(np.float32)
    corners[:, 2:] += corners[:, :2]
    scores = random.uniform(0, 0.2, (COUNT, CLASSES)).astype(np.float32)
    rows = corner_rows(boxes, fit_of(size, SIZE))
    places = random.permutation(COUNT)[: len(boxes)]
    corners[places] = rows[:, :4]
    scores[places, rows[:, 5].astype(int)] = rows[:, 4]
    return {"boxes": corners, "scores": scores}


def batched(*pictures: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs of several pictures as one batch."""
    return {name: np.stack([picture[name] for picture in pictures]) for name in pictures[0]}


def flat_rows(*pictures: tuple[PlainBox, ...], size: tuple[int, int] = STREET_SIZE) -> Array:
    """(n, 7): image, corners, score, class."""
    parts = [corner_rows(boxes, fit_of(size, SIZE)) for boxes in pictures]
    images = [np.full((len(part), 1), index, np.float32) for index, part in enumerate(parts)]
    return np.vstack([np.hstack(pair) for pair in zip(images, parts, strict=True)])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_boxes_and_scores_of_a_batch_are_the_known_boxes_after_suppression(is_transposed: bool) -> None:
    """Scores have their classes on either axis; NMS is per class."""
    outputs = batched(raw_outputs(STREET, STREET_SIZE), raw_outputs(YARD, YARD_SIZE, seed=2))
    if is_transposed:
        outputs["scores"] = np.ascontiguousarray(outputs["scores"].transpose(0, 2, 1))
    card = card_of("yolo-nas", SIZE, NAMES)
    assert_same_detections(decode(card, outputs, STREET_SIZE), clipped(plain_nms(STREET)))
    assert_same_detections(decode(card, outputs, YARD_SIZE, row=1), clipped(list(YARD), YARD_SIZE))


def test_boxes_and_scores_are_found_by_name_or_by_order() -> None:
    """The exporter's names in any order, other names as output-blob-names lists them, logits with apply-sigmoid."""
    boxes, scores = raw_outputs(STREET, STREET_SIZE).values()
    known = clipped(plain_nms(STREET))
    usual = {"pred_scores": scores, "pred_boxes": boxes}
    assert_same_detections(decode(card_of("yolo-nas", SIZE, list(usual)), usual, STREET_SIZE, row=None), known)
    other = {"913": scores, "904": boxes}
    card = card_of("yolo-nas", SIZE, list(other), LETTERBOX | {"output-blob-names": "904;913"})
    assert_same_detections(decode(card, other, STREET_SIZE, row=None), known)
    logits = {"boxes": boxes, "scores": np.log(scores / (1 - scores) + 1e-30)}
    card = card_of("yolo-nas", SIZE, NAMES, LETTERBOX | {"apply-sigmoid": "1"})
    assert_same_detections(decode(card, logits, STREET_SIZE, row=None), known)


@pytest.mark.parametrize("count", [0, 1, 6])
def test_flat_rows_of_the_own_image_are_the_known_boxes_without_suppression(count: int) -> None:
    """The score precedes the class. Rows of another image are not read, and the rows are not a batch."""
    boxes = STREET[:count]
    card = card_of("yolo-nas-flat", SIZE, ["graph2_flat_predictions"])
    rows = flat_rows(boxes, YARD)
    outputs = {"graph2_flat_predictions": rows}
    assert_same_detections(decode(card, outputs, STREET_SIZE, row=None), clipped(list(boxes)))
    with pytest.raises(InvalidRequest, match="iou has no effect"):
        decode(card, outputs, STREET_SIZE, row=None, wanted=ResultOptions(iou=0.5))


@pytest.mark.parametrize("padding", [0.0, -1.0])
def test_batch_format_takes_the_first_rows_of_each_picture(padding: float) -> None:
    """num_predictions says how many rows are valid; the others hold 0, or -1."""
    outputs: dict[str, Array] = {
        BATCH_FORMAT[0]: np.array([[len(STREET)], [len(YARD)]], np.int64),
        BATCH_FORMAT[1]: np.full((2, 9, 4), padding, np.float32),
        BATCH_FORMAT[2]: np.full((2, 9), padding, np.float32),
        BATCH_FORMAT[3]: np.full((2, 9), int(padding), np.int64),
    }
    for index, (boxes, size) in enumerate(((STREET, STREET_SIZE), (YARD, YARD_SIZE))):
        rows = corner_rows(boxes, fit_of(size, SIZE))
        outputs[BATCH_FORMAT[1]][index, : len(rows)] = rows[:, :4]
        outputs[BATCH_FORMAT[2]][index, : len(rows)] = rows[:, 4]
        outputs[BATCH_FORMAT[3]][index, : len(rows)] = rows[:, 5]
    card = card_of("efficient-nms", SIZE, BATCH_FORMAT)
    assert_same_detections(decode(card, outputs, STREET_SIZE), clipped(list(STREET)))
    assert_same_detections(decode(card, outputs, YARD_SIZE, row=1), clipped(list(YARD), YARD_SIZE))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"boxes": (1, COUNT, 5)}, rf"'boxes' has shape \[{COUNT}, 5\] for one image; \[n, 4\]"),
        ({"scores": (1, 7, CLASSES)}, rf"'scores' has shape \[7, {CLASSES}\] for one image; \[{COUNT}, classes\]"),
        ({"scores": (COUNT,)}, rf"'scores' has shape \[{COUNT}\], in which row 0 of the batch has no 2-D part"),
    ],
)
def test_wrong_shapes_are_the_models_fault(changed: dict[str, tuple[int, ...]], sentence: str) -> None:
    """The sentence names the output, its shape, and what was expected."""
    outputs = batched(raw_outputs(STREET, STREET_SIZE))
    outputs |= {name: np.zeros(shape, np.float32) for name, shape in changed.items()}
    with pytest.raises(EngineFailed, match=sentence):
        decode(card_of("yolo-nas", SIZE, NAMES), outputs, STREET_SIZE)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [3e38, -3e38, 0.0, -1.0])
def test_huge_and_negative_values_stay_in_the_picture(value: float) -> None:
    """Boxes are cut; those with a side of 0 or less are none; scores end at 1."""
    for name in NAMES:
        outputs = batched(raw_outputs(STREET, STREET_SIZE))
        outputs[name][0, :900] = value
        found = decode(card_of("yolo-nas", SIZE, NAMES), outputs, STREET_SIZE)
        assert ((found.xyxy >= 0) & (found.xyxy <= [640, 360, 640, 360])).all()
        assert ((found.score > 0) & (found.score <= 1)).all()


def test_no_boxes_are_no_detections() -> None:
    """Nothing seen is a result."""
    outputs = {"boxes": np.zeros((1, 0, 4), np.float32), "scores": np.zeros((1, 0, CLASSES), np.float32)}
    assert len(decode(card_of("yolo-nas", SIZE, NAMES), outputs, STREET_SIZE).score) == 0
