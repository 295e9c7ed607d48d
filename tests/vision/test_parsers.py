"""A model's answer becomes results, or an error that names model, version and output."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.protocol.errors import EngineFailed, Overloaded
from penstock.protocol.inference import Datatype, InferResponse, Tensor, tensor_from_bytes, tensor_from_numpy
from penstock.protocol.vision_results import Classes, Detections
from penstock.vision.card import VisionCard
from penstock.vision.layouts.layout import LayoutOptions
from penstock.vision.layouts.registry import LAYOUTS, find_layout
from penstock.vision.layouts.suppression import MAX_CANDIDATES, non_maximum_suppression
from penstock.vision.preprocess import Geometry
from penstock.vision.results import parse
from penstock.vision.spec import NetworkType, PrepareSpec

GEOMETRY = Geometry(200, 100, 50, 50, 0.25, 0.5)
Array = npt.NDArray[Any]


def answer(**arrays: Array) -> InferResponse:
    tensors = tuple(tensor_from_numpy(name, np.asarray(array)) for name, array in arrays.items())
    return InferResponse("street", "3", tensors)


def classifier(topk: int | None = 3, threshold: float = -math.inf, *, has_softmax: bool = False) -> VisionCard:
    options = LayoutOptions(("scores",), topk=topk, classifier_threshold=threshold, has_softmax=has_softmax)
    return VisionCard(NetworkType.CLASSIFIER, "x", PrepareSpec(50, 50), LAYOUTS["classification"], options, ())


def detector(layout: str = "boxes", topk: int | None = None, *, threshold: float = 0.2) -> VisionCard:
    options = LayoutOptions(("grid",), pre_cluster_threshold=threshold, nms_iou_threshold=0.5, topk=topk)
    found = find_layout(layout, NetworkType.DETECTOR)
    return VisionCard(NetworkType.DETECTOR, "x", PrepareSpec(50, 50), found, options, ())


def classes(card: VisionCard, response: InferResponse, row: int | None = None) -> Classes:
    result = parse(card, response, row, GEOMETRY)
    assert isinstance(result, Classes)
    return result


def boxes(card: VisionCard, response: InferResponse, row: int | None = None) -> Detections:
    result = parse(card, response, row, GEOMETRY)
    assert isinstance(result, Detections)
    return result


@pytest.mark.parametrize(
    ("layout", "array", "reason"),
    [
        ("semantic", np.zeros((8, 8), np.int64), "too little memory"),
        ("depth", np.zeros((1, 8, 8), np.float32), "too little memory"),
    ],
)
def test_result_that_needs_more_memory_than_there_is_is_overloaded(layout: str, array: Array, reason: str) -> None:
    """NumPy's and OpenCV's errors alike: 503, and no sign of a failing engine."""
    options = LayoutOptions(("scores",))
    card = VisionCard(NetworkType.OTHER, "x", PrepareSpec(8, 8), LAYOUTS[layout], options, ())
    side = 1 << 22
    with pytest.raises(Overloaded, match=reason):
        parse(card, answer(scores=array), None, Geometry(side, side, 8, 8, 8 / side, 8 / side))


# classification -------------------------------------------------------------------------------------------------------


def test_classification_gives_the_best_classes_first_and_ties_by_class() -> None:
    """topk of them, falling."""
    result = classes(classifier(), answer(scores=np.array([0.1, 0.3, 0.3, 0.25, 0.05], np.float32)))
    assert result.class_id.tolist() == [1, 2, 3]
    assert result.score.tolist() == pytest.approx([0.3, 0.3, 0.25])
    assert (result.score.dtype, result.class_id.dtype) == (np.float32, np.int64)


@pytest.mark.parametrize("topk", [1, 5, 99, 100, None])
def test_classification_of_many_classes_is_that_of_a_stable_sort(topk: int | None) -> None:
    """Also where hundreds are equally good."""
    for levels in (2, 7, 1000):
        score = np.random.default_rng(levels).integers(0, levels, 100).astype(np.float32)
        wanted = np.argsort(-score, kind="stable")[:topk]
        result = classes(classifier(topk), answer(scores=score))
        assert result.class_id.tolist() == wanted.tolist()
        assert result.score.tolist() == score[wanted].tolist()
        assert result.class_id.dtype == np.int64


def test_classification_with_softmax_gives_shares_even_of_huge_logits() -> None:
    """exp() does not overflow, and everything sums to one."""
    result = classes(classifier(None, has_softmax=True), answer(scores=np.array([1000.0, 999.0, -1000.0], np.float32)))
    assert result.score.tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0.0])


def test_classification_drops_what_is_under_the_threshold() -> None:
    """The threshold itself stays."""
    result = classes(classifier(None, 0.25), answer(scores=np.array([0.1, 0.5, 0.25], np.float64)))
    assert result.class_id.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ((4,), None),
        ((1, 4), None),
        ((1, 4, 1, 1), None),
        ((4, 1, 1), None),
        ((2, 4), 1),
        ((2, 4, 1, 1), 1),
        ((1, 4), 0),
    ],
)
def test_classification_finds_the_image_in_every_usual_shape(shape: tuple[int, ...], row: int | None) -> None:
    """With and without a batch axis, with the pooling layer's ones at the end."""
    scores = np.zeros(shape, np.float32)
    scores[(..., 2) if len(shape) < 3 else (..., 2, 0, 0)] = 0.9
    assert classes(classifier(1), answer(scores=scores), row).class_id.tolist() == [2]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_classification_takes_every_float_type(dtype: type) -> None:
    """The engine's precision is the model's business."""
    assert classes(classifier(1), answer(scores=np.array([0, 1], dtype))).score.tolist() == [1.0]


# boxes ----------------------------------------------------------------------------------------------------------------


def test_boxes_come_back_in_source_pixels_suppressed_and_sorted() -> None:
    """Per class, greedily, by falling score; clipped to the source; what lies outside is dropped."""
    response = answer(
        boxes=np.array(
            [[0, 0, 10, 10], [1, 0, 11, 10], [0, 0, 10, 10], [40, 40, 60, 60], [50, 0, 60, 10], [5, 5, 9, 9]],
            np.float32,
        ),
        scores=np.array([0.6, 0.9, 0.5, 0.7, 0.8, 0.2], np.float32),
        class_ids=np.array([1, 1, 2, 0, 0, 0], np.int32),
    )
    result = boxes(detector(), response)
    assert result.xyxy.tolist() == [[4, 0, 44, 20], [160, 80, 200, 100], [0, 0, 40, 20]]
    assert result.score.tolist() == pytest.approx([0.9, 0.7, 0.5])
    assert result.class_id.tolist() == [1, 0, 2]
    assert (result.xyxy.dtype, result.score.dtype, result.class_id.dtype) == (np.float32, np.float32, np.int64)
    assert boxes(detector(topk=1), response).class_id.tolist() == [1]


def test_boxes_of_a_batch_are_taken_by_row_and_padding_is_dropped() -> None:
    """Rows that only fill up have score 0, even where every score counts."""
    response = answer(
        boxes=np.array([[[0, 0, 10, 10], [0, 0, 0, 0]], [[20, 20, 30, 30], [0, 0, 9, 9]]], np.float32),
        scores=np.array([[0.9, 0.0], [0.8, 0.0]], np.float32),
        class_ids=np.array([[3, -1], [4, -1]], np.int64),
    )
    assert boxes(detector(threshold=0.0), response, 0).class_id.tolist() == [3]
    assert boxes(detector(threshold=0.0), response, 1).xyxy.tolist() == [[80, 40, 120, 60]]


def test_boxes_of_an_empty_answer_are_no_boxes() -> None:
    """Nothing seen is a result, not an error."""
    response = answer(
        boxes=np.zeros((0, 4), np.float32), scores=np.zeros(0, np.float32), class_ids=np.zeros(0, np.int64)
    )
    result = boxes(detector(), response)
    assert (result.xyxy.shape, result.score.shape, result.class_id.shape) == ((0, 4), (0,), (0,))


BOXES: dict[str, Array] = {
    "boxes": np.ones((2, 4), np.float32),
    "scores": np.ones(2, np.float32),
    "class_ids": np.ones(2, np.int64),
}


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("boxes", np.ones((2, 5), np.float32), r"shape \[2, 5\] for one image; \[n, 4\]"),
        ("boxes", np.ones(4, np.float32), r"shape \[4\], in which the image has no 2-D part"),
        ("boxes", np.ones((2, 2, 4), np.float32), r"shape \[2, 2, 4\]"),
        ("boxes", np.ones((2, 4), np.int32), "of type INT32; one of BF16, FP16, FP32, FP64"),
        ("boxes", np.array([[0, 0, 1, np.nan], [0, 0, 1, 1]], np.float32), "1 values that are NaN or infinite"),
        ("scores", np.ones(3, np.float32), r"shape \[3\] for one image; \[2\]"),
        ("scores", np.array([np.inf, 0.5], np.float32), "NaN or infinite"),
        ("scores", np.array([1e300, 0.5], np.float64), "NaN or infinite"),
        ("class_ids", np.ones(2, np.float32), "of type FP32"),
        ("class_ids", np.ones(1, np.int64), r"\[2\] \(one class a box\)"),
        ("class_ids", np.array([0, -1]), "holds -1"),
    ],
)
def test_boxes_that_break_the_contract_are_the_models_fault(name: str, array: Array, sentence: str) -> None:
    """The error names model, version and output; no warning, no half result."""
    with pytest.raises(EngineFailed, match=f"model 'street' version 3: output '{name}' .*{sentence}"):
        parse(detector(), answer(**{**BOXES, name: array}), None, GEOMETRY)


def test_an_output_that_is_missing_is_named_with_those_that_came() -> None:
    """So that a renamed output is found at once."""
    with pytest.raises(EngineFailed, match=r"output 'boxes' is missing \(outputs that came: 'b', 's'\)"):
        parse(detector(), answer(b=np.ones(1), s=np.ones(1)), None, GEOMETRY)


def test_an_output_with_too_few_bytes_or_rows_is_refused() -> None:
    """An engine that answers 0 bytes, text, or fewer rows than it was given is not believed."""
    empty = InferResponse("street", "3", (Tensor("scores", Datatype.FP32, (1, 4), memoryview(b"")),))
    with pytest.raises(EngineFailed, match=r"has 0 bytes; its shape \[1, 4\] needs 16"):
        parse(classifier(), empty, 0, GEOMETRY)
    with pytest.raises(EngineFailed, match="of type BYTES"):
        parse(classifier(), InferResponse("street", "3", (tensor_from_bytes("scores", [b"cat"]),)), 0, GEOMETRY)
    with pytest.raises(EngineFailed, match="row 2 of the batch"):
        parse(classifier(), answer(scores=np.ones((2, 4), np.float32)), 2, GEOMETRY)
    with pytest.raises(EngineFailed, match="row 1 of the batch"):
        parse(classifier(), answer(scores=np.ones(4, np.float32)), 1, GEOMETRY)


# fastestdet's contract; its numbers are in test_fastestdet.py ---------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        (np.zeros((5, 22, 22), np.float32), r"\[5 \+ classes, rows, columns\]"),
        (np.zeros((85, 0, 22), np.float32), r"\[5 \+ classes, rows, columns\]"),
        (np.zeros((85, 484), np.float32), "no 3-D part"),
        (np.full((85, 22, 22), np.nan, np.float32), "NaN"),
    ],
)
def test_fastestdet_grid_that_breaks_the_contract_is_refused(grid: Array, sentence: str) -> None:
    """As every output."""
    with pytest.raises(EngineFailed, match=f"output 'grid' .*{sentence}"):
        parse(detector("fastestdet"), answer(grid=grid), None, GEOMETRY)


def test_fastestdet_of_an_empty_picture_sees_nothing() -> None:
    """Zeros everywhere, negative zero noise too, are no boxes and no warning."""
    grid = np.full((1, 85, 22, 22), -1e-9, np.float32)
    assert len(boxes(detector("fastestdet"), answer(grid=grid), 0).score) == 0


# suppression ----------------------------------------------------------------------------------------------------------


def plain_suppression(xyxy: Array, score: Array, class_id: Array, threshold: float) -> list[int]:
    """The textbook's double loop."""
    kept: list[int] = []
    for candidate in sorted(range(len(score)), key=lambda index: (-score[index], index)):
        if all(
            class_id[other] != class_id[candidate] or overlap(xyxy[other], xyxy[candidate]) <= threshold
            for other in kept
        ):
            kept.append(candidate)
    return kept


def overlap(left: Sequence[float] | Array, right: Sequence[float] | Array) -> float:
    width = min(left[2], right[2]) - max(left[0], right[0])
    height = min(left[3], right[3]) - max(left[1], right[1])
    shared = float(max(width, 0) * max(height, 0))
    total = float((left[2] - left[0]) * (left[3] - left[1]) + (right[2] - right[0]) * (right[3] - right[1])) - shared
    return shared / total if total > 0 else 0.0


@pytest.mark.parametrize("seed", range(8))
def test_suppression_equals_the_plain_double_loop(seed: int) -> None:
    """On crowds with equal scores, corners below 0, and empty boxes among them, which are left out."""
    generator = np.random.default_rng(seed)
    corner = generator.integers(-30, 30, (80, 2)) if seed % 2 else generator.integers(0, 30, (80, 2))
    xyxy = np.concatenate([corner, corner + generator.integers(0, 15, (80, 2))], axis=1).astype(np.float32)
    score = (generator.integers(1, 20, 80) / 20).astype(np.float32)
    class_id = generator.integers(0, 3, 80)
    plain = [
        index for index in plain_suppression(xyxy, score, class_id, 0.4) if (xyxy[index, 2:] > xyxy[index, :2]).all()
    ]
    assert non_maximum_suppression(xyxy, score, class_id, 0.4).tolist() == plain


def test_suppression_of_more_boxes_than_it_takes_keeps_the_best() -> None:
    """A model that answers a hundred thousand boxes costs a bounded time."""
    count = 100_000
    xyxy = np.tile(np.arange(count, dtype=np.float32)[:, None] * 2, 4) + np.array([0, 0, 1, 1], np.float32)
    kept = non_maximum_suppression(xyxy, np.linspace(0, 1, count, dtype=np.float32), np.zeros(count, np.int64), 0.5)
    assert kept.tolist() == list(range(count - 1, count - 1 - MAX_CANDIDATES, -1))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threshold", [0.0, 0.45, 1.0])
def test_suppression_of_many_boxes_equals_the_plain_double_loop(seed: int, threshold: float) -> None:
    """Most overlap none of their class; some touch, are equal, or have equal scores."""
    generator = np.random.default_rng(seed)
    corner = generator.integers(-50, 600, (700, 2))
    corner[600:] = corner[:100] + generator.integers(0, 4, (100, 2))
    xyxy = np.concatenate([corner, corner + generator.integers(4, 60, (700, 2))], axis=1).astype(np.float32)
    score = (generator.integers(1, 400, 700) / 400).astype(np.float32)
    class_id = generator.integers(0, 40, 700)
    class_id[600:] = class_id[:100]
    plain = plain_suppression(xyxy, score, class_id, threshold)
    assert len(plain) > 500 or threshold == 0.0
    assert non_maximum_suppression(xyxy, score, class_id, threshold).tolist() == plain


@pytest.mark.filterwarnings("error")
def test_suppression_of_many_huge_boxes_has_no_warning() -> None:
    """Their areas would overflow float32."""
    xyxy = np.tile(np.array([[-3e38, -3e38, 3e38, 3e38]], np.float32), (900, 1))
    found = non_maximum_suppression(xyxy, np.full(900, 0.5, np.float32), np.arange(900) % 90, 0.45)
    assert found.tolist() == list(range(90))
