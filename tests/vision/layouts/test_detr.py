"""Layouts of queries: RT-DETR of Ultralytics, DETR, RF-DETR, against a plain decoding in loops."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed
from penstock.vision.layouts.detr import best_pairs
from penstock.vision.layouts.layout import LayoutOptions
from tests.support.plain_detections import PlainBox, assert_same_detections
from tests.vision.layouts.pictures import BOXES, HEIGHT, WIDTH, Array, Case, assert_harmless, batch_of, scaled, seen

QUERIES, CLASSES = 30, 5


def centred(boxes: Array | list[PlainBox]) -> Array:
    """(n, 4) centre and size in fractions of the picture."""
    small = [scaled(box, 1 / WIDTH, 1 / HEIGHT) for box in boxes]
    rows = [((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2, box.x1 - box.x0, box.y1 - box.y0) for box in small]
    return np.array(rows, np.float32)


def logit(share: float) -> float:
    return math.log(share / (1 - share))


def ultralytics(boxes: tuple[PlainBox, ...] = BOXES) -> dict[str, Array]:
    rows = np.full((QUERIES, 4 + CLASSES), 0.01, np.float32)
    rows[: len(boxes), :4] = centred(list(boxes))
    for row, box in enumerate(boxes):
        rows[row, 4 + box.class_id] = box.score
    return {"output0": rows}


def detr(boxes: tuple[PlainBox, ...] = BOXES) -> dict[str, Array]:
    logits = np.zeros((QUERIES, CLASSES + 1), np.float32)
    logits[:, -1] = 9.0
    places = np.full((QUERIES, 4), 0.5, np.float32)
    places[: len(boxes)] = centred(list(boxes))
    for row, box in enumerate(boxes):  # softmax of log(score), and of the rest in equal parts
        logits[row] = math.log((1 - box.score) / CLASSES)
        logits[row, box.class_id] = math.log(box.score)
    return {"pred_logits": logits, "pred_boxes": places}


def rf_detr(boxes: tuple[PlainBox, ...] = BOXES) -> dict[str, Array]:
    logits = np.full((QUERIES, CLASSES), -6.0, np.float32)
    places = np.full((QUERIES, 4), 0.5, np.float32)
    places[: len(boxes)] = centred(list(boxes))
    for row, box in enumerate(boxes):
        logits[row, box.class_id] = logit(box.score)
    return {"dets": places, "labels": logits}


MAKERS: dict[str, Callable[..., dict[str, Array]]] = {
    "rt-detr-ultralytics": ultralytics,
    "detr": detr,
    "rf-detr": rf_detr,
}


def plain_box(row: Array, class_id: int, score: float) -> PlainBox:
    """In pixels of the picture, clipped."""
    x, y, width, height = (float(value) for value in row)
    box = PlainBox(x - width / 2, y - height / 2, x + width / 2, y + height / 2, class_id, score)
    return seen([scaled(box, WIDTH, HEIGHT)])[0]


def plain_ultralytics(outputs: dict[str, Array], threshold: float) -> list[PlainBox]:
    rows = outputs["output0"]
    found = []
    for row in rows:
        scores = [float(score) for score in row[4:]]
        if max(scores) > threshold:
            found.append(plain_box(row[:4], scores.index(max(scores)), max(scores)))
    return found


def plain_detr(outputs: dict[str, Array], threshold: float) -> list[PlainBox]:
    found = []
    for logits, row in zip(outputs["pred_logits"], outputs["pred_boxes"], strict=True):
        powers = [math.exp(float(value)) for value in logits]
        shares = [power / sum(powers) for power in powers][:-1]
        if max(shares) > threshold:
            found.append(plain_box(row, shares.index(max(shares)), max(shares)))
    return found


def plain_rf_detr(outputs: dict[str, Array], threshold: float) -> list[PlainBox]:
    """As RF-DETR's PostProcess: the best pairs of query and class of all, as many as there are queries."""
    pairs = []
    for query, logits in enumerate(outputs["labels"]):
        for class_id, value in enumerate(logits):
            pairs.append((1 / (1 + math.exp(-float(value))), query, class_id))
    best = sorted(pairs, reverse=True)[: len(outputs["labels"])]
    return [plain_box(outputs["dets"][query], class_id, score) for score, query, class_id in best if score > threshold]


PLAIN = {"rt-detr-ultralytics": plain_ultralytics, "detr": plain_detr, "rf-detr": plain_rf_detr}


def noise(layout: str, seed: int) -> dict[str, Array]:
    """Random outputs: overlapping boxes, scores on both sides of the threshold."""
    random = np.random.default_rng(seed)
    places = np.hstack([random.uniform(0, 1, (QUERIES, 2)), random.uniform(0.05, 0.6, (QUERIES, 2))]).astype(np.float32)
    scores = random.uniform(0, 0.6, (QUERIES, CLASSES)).astype(np.float32)
    if layout == "rt-detr-ultralytics":
        return {"output0": np.hstack([places, scores])}
    logits = random.normal(-1, 2, (QUERIES, CLASSES + 1)).astype(np.float32)
    if layout == "detr":
        return {"pred_logits": logits, "pred_boxes": places}
    return {"dets": places, "labels": logits[:, :-1] + np.float32(3)}


@pytest.mark.parametrize("layout", MAKERS)
def test_queries_with_known_boxes_give_them_back(layout: str) -> None:
    """Corners in pixels of the picture, clipped to it, with class and score, by falling score."""
    assert_same_detections(Case(layout).detect(MAKERS[layout](), None), seen(BOXES))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", MAKERS)
def test_queries_equal_the_plain_decoding(layout: str, seed: int) -> None:
    """Nothing is suppressed, however much boxes overlap."""
    outputs = noise(layout, seed)
    case = Case(layout)
    wanted = PLAIN[layout](outputs, case.threshold)
    assert len(wanted) > 10
    assert_same_detections(case.detect(outputs), wanted)


@pytest.mark.parametrize("layout", MAKERS)
def test_queries_of_a_batch_are_taken_by_row(layout: str) -> None:
    """Each picture has its own row."""
    make = MAKERS[layout]
    batch = batch_of(make(BOXES[:1]), make(BOXES[1:]))
    assert_same_detections(Case(layout).detect(batch, 0), seen(BOXES[:1]))
    assert_same_detections(Case(layout).detect(batch, 1), seen(BOXES[1:]))


def test_rf_detr_has_a_query_with_two_classes_twice() -> None:
    """Its classes are independent: each pair of query and class is a candidate."""
    outputs = rf_detr(BOXES[:1])
    outputs["labels"][0, 4] = logit(0.8)
    assert_same_detections(Case("rf-detr").detect(outputs), [*BOXES[:1], BOXES[0]._replace(class_id=4, score=0.8)])


def test_rf_detr_has_no_more_boxes_than_queries() -> None:
    """The best pairs of all queries, also where every class is likely."""
    found = best_pairs(np.linspace(0, 1, 60).reshape(20, 3), LayoutOptions(("x",)))
    assert len(found.row) == 20
    assert found.score.tolist() == sorted(found.score.tolist(), reverse=True)
    assert set(found.row.tolist()) == set(range(13, 20))


def test_detr_ignores_a_query_that_is_most_likely_no_object() -> None:
    """The last column counts in the softmax, and is never a class."""
    outputs = detr(BOXES[:1])
    outputs["pred_logits"][0, -1] = 9.0
    assert len(Case("detr").detect(outputs).score) == 0


def test_detr_and_rf_detr_find_their_outputs_in_any_order() -> None:
    """By the usual names; a model with others needs them in order."""
    one = detr()
    assert_same_detections(Case("detr").detect({"hidden": np.zeros(1), **one}), seen(BOXES))
    two = dict(reversed(rf_detr().items()))
    assert_same_detections(Case("rf-detr").detect(two), seen(BOXES))
    named = {"a": two["dets"], "b": two["labels"]}
    assert_same_detections(Case("rf-detr").detect(named), seen(BOXES))


@pytest.mark.parametrize("layout", MAKERS)
def test_queries_with_hostile_values_are_refused_or_bounded(layout: str) -> None:
    """NaN, infinity, huge numbers, empty outputs, wrong shapes and types."""
    assert_harmless(Case(layout), MAKERS[layout]())


@pytest.mark.parametrize(
    ("layout", "name", "array", "sentence"),
    [
        ("rt-detr-ultralytics", "output0", np.zeros((9, 4), np.float32), r"\[queries, 4 \+ classes\] was expected"),
        ("detr", "pred_boxes", np.zeros((QUERIES, 5), np.float32), r"\[queries, 4\] was expected"),
        ("detr", "pred_logits", np.zeros((QUERIES, 1), np.float32), r"\[queries, classes \+ 1\] was expected"),
        ("rf-detr", "labels", np.zeros((9, 5), np.float32), r"\[30, classes\] \(a row for each box of 'dets'\)"),
        ("rf-detr", "labels", np.zeros((QUERIES, 5), np.int64), "is of type INT64"),
    ],
)
def test_queries_of_another_shape_are_refused_with_the_shape_that_is_needed(
    layout: str, name: str, array: Array, sentence: str
) -> None:
    """The error names the output."""
    with pytest.raises(EngineFailed, match=f"output '{name}' .*{sentence}"):
        Case(layout).detect({**MAKERS[layout](), name: array})
