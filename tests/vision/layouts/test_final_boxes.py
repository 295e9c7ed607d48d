"""Layouts of final boxes: RT-DETR, torchvision, SSD, TensorFlow's detection API, against a plain decoding in loops."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed
from tests.support.plain_detections import PlainBox, assert_same_detections
from tests.vision.layouts.pictures import BOXES, HEIGHT, WIDTH, Array, Case, assert_harmless, batch_of, scaled, seen

ROWS = 40
Boxes = tuple[PlainBox, ...]


def columns(boxes: Boxes, *, dtype: type = np.int64) -> tuple[Array, Array, Array]:
    """Corners, class ids and scores, by falling score; filled up with boxes of low scores."""
    rows = [*boxes, *[PlainBox(3, 3, 50, 50, 1, 0.01)] * (ROWS - len(boxes))]
    corners = np.array([box[:4] for box in rows], np.float32)
    return corners, np.array([box.class_id for box in rows], dtype), np.array([box.score for box in rows], np.float32)


def rt_detr(boxes: Boxes = BOXES) -> dict[str, Array]:
    corners, ids, scores = columns(boxes)
    return {"labels": ids, "boxes": corners, "scores": scores}


def torchvision(boxes: Boxes = BOXES) -> dict[str, Array]:
    fit = Case("torchvision").fit
    corners, ids, scores = columns(tuple(fit.to_network(box) for box in boxes))
    return {"3047": corners, "3049": scores, "3048": ids}


def small(boxes: Boxes) -> Boxes:
    """In fractions of the picture, which a stretched network shares."""
    return tuple(scaled(box, 1 / WIDTH, 1 / HEIGHT) for box in boxes)


def ssd(boxes: Boxes = BOXES) -> dict[str, Array]:
    corners, ids, scores = columns(small(boxes))
    return {"bboxes": corners, "labels": ids, "scores": scores}


def detection_output(boxes: Boxes = BOXES, image: int = 0) -> dict[str, Array]:
    """OpenVINO's: rows of image id, class, score, corners; after the last one -1, and whatever was in memory."""
    corners, ids, scores = columns(small(boxes), dtype=np.float32)
    rows = np.hstack([np.full((ROWS, 1), image), ids[:, np.newaxis], scores[:, np.newaxis], corners])
    rows[len(boxes)] = [-1, 0, 0, 0, 0, 0, 0]
    rows[len(boxes) + 1 :] = [image, np.nan, 0.9, 1e30, np.inf, 5, 5]
    return {"detection_out": rows[np.newaxis, np.newaxis].astype(np.float32)}


def tf_detection(boxes: Boxes = BOXES) -> dict[str, Array]:
    """Rows after num_detections were never written."""
    corners, ids, scores = columns(small(boxes), dtype=np.float32)
    ids[len(boxes) :], scores[len(boxes) :] = np.nan, 0.9
    return {
        "num_detections:0": np.array(float(len(boxes)), np.float32),
        "detection_boxes:0": corners[:, [1, 0, 3, 2]],
        "detection_scores:0": scores,
        "detection_classes:0": ids,
    }


MAKERS: dict[str, Callable[..., dict[str, Array]]] = {
    "rt-detr": rt_detr,
    "torchvision": torchvision,
    "ssd": ssd,
    "tf-detection": tf_detection,
}


@pytest.mark.parametrize("layout", MAKERS)
def test_final_boxes_with_known_boxes_give_them_back(layout: str) -> None:
    """Corners in pixels of the picture, clipped to it, with class and score, by falling score."""
    outputs = MAKERS[layout]()
    assert_same_detections(Case(layout).detect(outputs, None), seen(BOXES))
    assert_same_detections(Case(layout).detect(outputs, 0), seen(BOXES))


@pytest.mark.parametrize("layout", MAKERS)
def test_final_boxes_of_a_batch_are_taken_by_row(layout: str) -> None:
    """Each picture has its own row."""
    batch = batch_of(MAKERS[layout](BOXES[:1]), MAKERS[layout](BOXES[1:]))
    assert_same_detections(Case(layout).detect(batch, 0), seen(BOXES[:1]))
    assert_same_detections(Case(layout).detect(batch, 1), seen(BOXES[1:]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", MAKERS)
def test_final_boxes_equal_the_plain_decoding(layout: str, seed: int) -> None:
    """Nothing is suppressed, however much boxes overlap; the order of the rows is of no matter."""
    random = np.random.default_rng(seed)
    low = random.uniform(0, 150, (ROWS, 2))
    corners = np.hstack([low, low + random.uniform(4, 60, (ROWS, 2))])
    scores, ids = random.uniform(0, 0.9, ROWS), random.integers(0, 5, ROWS)
    boxes = [
        PlainBox(*map(float, row), int(one), float(score)) for row, one, score in zip(corners, ids, scores, strict=True)
    ]
    case = Case(layout)
    wanted = [box for box in boxes if box.score > case.threshold]
    assert len(wanted) > 10
    assert_same_detections(case.detect(MAKERS[layout](tuple(boxes))), seen(wanted))


def test_torchvision_in_a_padded_network_has_pixels_of_what_it_was_fed() -> None:
    """The padding and the scale are undone."""
    case = Case("torchvision", is_padded=True)
    corners, ids, scores = columns(tuple(case.fit.to_network(box) for box in BOXES))
    assert_same_detections(case.detect({"a": scores, "b": ids.astype(np.int32), "c": corners}, None), seen(BOXES))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_torchvision_of_any_number_of_boxes_keeps_its_outputs_apart(count: int) -> None:
    """Four scores are no box: boxes have one axis more. Nothing found is a result."""
    names = ("boxes_of_mine", "ids", "confidence")
    fit = Case("torchvision").fit
    rows = columns(tuple(fit.to_network(box) for box in BOXES))
    outputs = {name: part[:count] for name, part in zip(names, rows, strict=True)}
    for row in (None, 0):
        assert_same_detections(Case("torchvision").detect(outputs, row), seen(BOXES[:count]))
        batch = {name: part[np.newaxis] for name, part in outputs.items()}
        assert_same_detections(Case("torchvision").detect(batch, row), seen(BOXES[:count]))


def test_torchvision_with_more_outputs_needs_names() -> None:
    """Mask R-CNN has masks as well; outputs of the usual names are found, others must be named."""
    corners, scores, ids = torchvision().values()
    masks = np.zeros((ROWS, 1, 28, 28), np.float32)
    usual = {"boxes": corners, "labels": ids, "scores": scores, "masks": masks}
    assert len(Case("torchvision").detect(usual, None).score) == len(BOXES)
    two = {"a": corners, "b": ids, "c": scores, "d": ids}
    with pytest.raises(EngineFailed, match="name the three by output-blob-names"):
        Case("torchvision").detect(two, None)
    named = Case("torchvision", options={"output_names": ("a", "b", "c")})
    assert len(named.detect(two, None).score) == len(BOXES)


def test_ssd_rows_end_at_the_first_negative_image_id() -> None:
    """What OpenVINO never wrote after it is not read, not even to check it."""
    assert_same_detections(Case("ssd").detect(detection_output(), None), seen(BOXES))
    assert_same_detections(Case("ssd").detect(detection_output(()), 0), [])


def test_ssd_rows_of_a_batch_are_taken_by_their_image_id() -> None:
    """One output has the boxes of all pictures."""
    first, second = (
        detection_output(boxes, image)["detection_out"][0, 0, : len(boxes)]
        for image, boxes in enumerate((BOXES[:2], BOXES[2:]))
    )
    batch = {"detection_out": np.concatenate([first, second])[np.newaxis, np.newaxis]}
    assert_same_detections(Case("ssd").detect(batch, 0), seen(BOXES[:2]))
    assert_same_detections(Case("ssd").detect(batch, 1), seen(BOXES[2:]))
    assert_same_detections(Case("ssd").detect(batch, 2), [])


def test_tensorflow_outputs_are_taken_in_order_if_they_have_other_names() -> None:
    """TensorFlow Lite's: boxes, classes, scores, count."""
    count, boxes, scores, ids = tf_detection().values()
    lite = {"out:1": boxes, "out:3": ids, "out:0": scores, "out:2": count[np.newaxis]}
    assert_same_detections(Case("tf-detection").detect(lite, None), seen(BOXES))


def test_tensorflow_count_beyond_its_rows_is_refused() -> None:
    """The error names the output and both numbers."""
    outputs = {**tf_detection(), "num_detections:0": np.array([41.0], np.float32)}
    with pytest.raises(EngineFailed, match="output 'num_detections:0' is 41; 'detection_boxes:0' has 40 rows"):
        Case("tf-detection").detect(outputs)


def test_final_boxes_are_filtered_by_what_the_client_wants() -> None:
    """Classes of the card's numbering, a threshold for one class, and a limit."""
    case = Case("rt-detr", options={"class_ids": (7, 8, 9), "class_filter": frozenset({9, 8})})
    wanted = [box._replace(class_id=box.class_id + 7) for box in BOXES if box.class_id != 0]
    assert_same_detections(case.detect(rt_detr()), seen(wanted))
    strict = Case("rt-detr", options={"class_thresholds": ((2, 0.95),)})
    assert_same_detections(strict.detect(rt_detr()), seen([box for box in BOXES if box.class_id != 2]))
    one = replace(strict, options={"topk": 1})
    assert_same_detections(one.detect(rt_detr()), seen(BOXES[:1]))


@pytest.mark.parametrize("make", [*MAKERS.values(), detection_output])
def test_final_boxes_with_hostile_values_are_refused_or_bounded(make: Callable[..., dict[str, Array]]) -> None:
    """NaN, infinity, huge numbers, fractions and negative numbers as classes, wrong shapes and types."""
    layout = next((name for name, one in MAKERS.items() if one is make), "ssd")
    assert_harmless(Case(layout), make())


@pytest.mark.parametrize(
    ("layout", "name", "array", "sentence"),
    [
        ("rt-detr", "boxes", np.zeros((ROWS, 5), np.float32), r"\[n, 4\] was expected"),
        ("rt-detr", "labels", np.zeros(3, np.int64), r"\[40\] \(one for each box of 'boxes'\)"),
        ("rt-detr", "labels", np.full(ROWS, 0.5, np.float32), "holds 0.5; an integer"),
        ("rt-detr", "scores", np.zeros(3, np.float32), r"\[40\] \(one for each box of 'boxes'\)"),
        ("ssd", "scores", np.full(ROWS, np.nan, np.float32), "40 values that are NaN or infinite"),
        ("tf-detection", "detection_classes:0", np.full(ROWS, 1.5, np.float32), "holds 1.5"),
    ],
)
def test_final_boxes_of_another_shape_are_refused_with_what_is_needed(
    layout: str, name: str, array: Array, sentence: str
) -> None:
    """The error names the output."""
    with pytest.raises(EngineFailed, match=f"output '{name}' .*{sentence}"):
        Case(layout).detect({**MAKERS[layout](), name: array})
