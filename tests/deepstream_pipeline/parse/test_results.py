"""Outputs of an engine as boxes and classes of the pipeline."""

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Array, Datatype, InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Classes, Embedding, Mask, TextLine, TextLines, VisionResult
from penstock.protocol.vision_results import Detections as DetectorResult
from penstock.vision.preprocess import geometry_of
from penstock_video.errors import InferFailed, InferRefused
from penstock_video.infer import calls
from penstock_video.infer.calls import RowResult, RowsResult, classes_of, crop_result_of, detections_of, failed
from penstock_video.infer.network import Network, network_from
from penstock_video.types import NO_CLASS, ClassScore

WORDS = {"network-type": "0", "parse-bbox-func-name": "boxes", "labels": "person;bicycle", "maintain-aspect-ratio": "1"}
FP32 = Datatype.FP32
BOXES = (
    TensorSpec("boxes", FP32, (-1, 4)),
    TensorSpec("scores", FP32, (-1,)),
    TensorSpec("class_ids", Datatype.INT64, (-1,)),
)


def detector(**words: str) -> Network:
    """Its input is 100 x 100, into which pictures are fitted with their aspect ratio."""
    inputs = (TensorSpec("x", FP32, (3, 100, 100)),)
    return network_from(ModelConfig("seer", "onnxruntime", 4, inputs, BOXES, WORDS | words))


def classifier(**words: str) -> Network:
    parameters = {"network-type": "1", "labels": "cat;dog"} | words
    inputs, outputs = (TensorSpec("x", FP32, (3, 8, 8)),), (TensorSpec("y", FP32, (3,)),)
    return network_from(ModelConfig("namer", "onnxruntime", 4, inputs, outputs, parameters))


def answer(names: Sequence[str], *arrays: Array) -> RowsResult:
    """To rows that shared a call."""
    outputs = tuple(tensor_from_numpy(name, array) for name, array in zip(names, arrays, strict=True))
    response = InferResponse("seer", "3", outputs)
    return RowsResult(None, tuple(RowResult(response, place) for place in range(arrays[0].shape[0])))


def boxes(*rows: list[list[float]]) -> RowsResult:
    """A row: [x1, y1, x2, y2, score, class id] each."""
    table = np.array(rows, np.float32)
    return answer(("boxes", "scores", "class_ids"), table[..., :4], table[..., 4], table[..., 5].astype(np.int64))


TWO = boxes([[0, 0, 10, 10, 0.9, 0], [50, 20, 60, 40, 0.8, 1]], [[20, 10, 40, 30, 0.7, 1], [0, 0, 0, 0, 0.0, 0]])


def test_boxes_are_in_pixels_of_the_frame_that_the_row_was_made_of() -> None:
    """A source of 400 x 200 in a network of 100 x 100: four times as large."""
    seen = detections_of(detector(), TWO, 0, 400, 200)
    assert seen.xyxy.tolist() == [[0, 0, 40, 40], [200, 80, 240, 160]]
    assert (seen.score.tolist(), seen.class_id.tolist()) == (pytest.approx([0.9, 0.8]), [0, 1])
    other = detections_of(detector(), TWO, 1, 100, 50)
    assert other.xyxy.tolist() == [[20, 10, 40, 30]]


def test_threshold_and_classes_of_ones_own_hold() -> None:
    """pre-cluster-threshold and operate-on-class-ids of the pipeline, in place of the model's."""
    assert len(detections_of(detector().with_threshold(0.85), TWO, 0, 400, 200)) == 1
    bicycles = detections_of(detector().of_classes(frozenset((1,))), TWO, 0, 400, 200)
    assert bicycles.class_id.tolist() == [1]
    assert bicycles.xyxy.tolist() == [[200, 80, 240, 160]]
    assert len(detections_of(detector().of_classes(frozenset((5,))), TWO, 0, 400, 200)) == 0


def test_shapes_of_the_wanted_classes_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, keypoints and oriented boxes stay with their boxes."""
    masks = tuple(Mask(200, 400, left, 0, np.ones((2, 2), np.bool_)) for left in (0, 7))
    points, turned = np.arange(12, dtype=np.float32).reshape(2, 2, 3), np.arange(10, dtype=np.float32).reshape(2, 5)
    xyxy, score = np.zeros((2, 4), np.float32), np.ones(2, np.float32)
    found = DetectorResult(xyxy, score, np.array([0, 1]), masks, points, turned)
    monkeypatch.setattr(calls, "parse", lambda *_: found)
    every = detections_of(detector(), TWO, 0, 400, 200)
    assert (every.masks, every.keypoints, every.xywhr) == (masks, points, turned)
    bicycles = detections_of(detector().of_classes(frozenset((1,))), TWO, 0, 400, 200)
    assert bicycles.masks == masks[1:]
    assert bicycles.keypoints is not None
    assert bicycles.xywhr is not None
    assert bicycles.keypoints.tolist() == points[1:].tolist()
    assert bicycles.xywhr.tolist() == turned[1:].tolist()


def test_frame_in_which_nothing_is_seen_has_no_boxes() -> None:
    """Of the right shapes all the same."""
    assert detections_of(detector(), boxes([[0, 0, 0, 0, 0.0, 0]]), 0, 400, 200).xyxy.shape == (0, 4)


def test_classes_have_names_and_the_likeliest_comes_first() -> None:
    """A class without a label has its number; thresholds hold."""
    said = answer(("y",), np.array([[0.1, 0.6, 0.3], [0.9, 0.05, 0.05]], np.float32))
    assert classes_of(classifier(topk="2"), said, 0) == (
        ClassScore("namer", 1, "dog", pytest.approx(0.6)),
        ClassScore("namer", 2, "class 2", pytest.approx(0.3)),
    )
    assert [one.label for one in classes_of(classifier().with_threshold(0.5), said, 1)] == ["cat"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_answer_that_is_no_number_names_the_model_and_the_output(value: float) -> None:
    """And costs that frame, not the program."""
    broken = boxes([[0, 0, value, 10, 0.9, 0]])
    with pytest.raises(InferFailed, match=r"'seer' version 3: output 'boxes'.*NaN"):
        detections_of(detector(), broken, 0, 400, 200)


def test_answer_without_its_outputs_names_them() -> None:
    """An engine of another version of the model."""
    with pytest.raises(InferFailed, match="is missing"):
        detections_of(detector(), answer(("other",), np.zeros((1, 4), np.float32)), 0, 400, 200)


def test_row_that_was_not_answered_raises_why() -> None:
    """Each of the rows its own reason."""
    with pytest.raises(InferRefused, match="full"):
        detections_of(detector(), failed(InferRefused("full"), 2), 1, 400, 200)
    with pytest.raises(InferFailed, match="never submitted"):
        detections_of(detector(), TWO, 2, 400, 200)


def test_unexpected_kind_of_network_is_reported() -> None:
    """A classifier has no boxes, a detector no classes of the whole."""
    with pytest.raises(InferFailed, match="whole picture"):
        detections_of(classifier(), answer(("y",), np.zeros((1, 3), np.float32)), 0, 8, 8)
    with pytest.raises(InferFailed, match="finds objects"):
        classes_of(detector(), TWO, 0)


ONE_BOX = np.zeros((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, np.int64)
POSES = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
LINES = TextLines((TextLine("B AB 12", 0.9), TextLine("", 0.8)))


@pytest.mark.parametrize(
    ("found", "classes"),
    [
        (LINES, (ClassScore("namer", NO_CLASS, "B AB 12", 0.9),)),
        (Embedding(np.array([0.6, -0.8], np.float32)), (ClassScore("namer", NO_CLASS, "", 1.0, (0.6, -0.8)),)),
        (Classes(np.array([0.5], np.float32), np.array([1])), (ClassScore("namer", 1, "dog", 0.5),)),
        (DetectorResult(*ONE_BOX, keypoints=np.zeros((0, 2, 3), np.float32)), ()),
    ],
    ids=["text", "vector", "classes", "none found"],
)
def test_result_of_a_crop_is_what_its_model_says(
    monkeypatch: pytest.MonkeyPatch, found: VisionResult, classes: tuple[ClassScore, ...]
) -> None:
    """Texts and classes are labels, an embedding is a vector; a place without text is left out."""
    monkeypatch.setattr(calls, "parse", lambda *_: found)
    result = crop_result_of(classifier(), TWO, 0, geometry_of(8, 8, classifier().prepare_spec))
    assert (result.classes, result.keypoints, bool(result)) == (classes, None, bool(classes))


def test_result_of_a_crop_has_the_keypoints_of_the_best_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour in the same crop has a lower score."""
    two = (np.repeat(array, 2, axis=0) for array in ONE_BOX)
    monkeypatch.setattr(calls, "parse", lambda *_: DetectorResult(*two, keypoints=POSES))
    result = crop_result_of(classifier(), TWO, 0, geometry_of(8, 8, classifier().prepare_spec))
    assert result.keypoints is not None
    assert result.keypoints.tolist() == POSES[0].tolist()


def test_result_of_a_crop_that_is_of_another_kind_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes alone say nothing of the object that was cut out."""
    monkeypatch.setattr(calls, "parse", lambda *_: DetectorResult(*ONE_BOX))
    with pytest.raises(InferFailed, match="'namer' has no classes, text, vector or keypoints"):
        crop_result_of(classifier(), TWO, 0, geometry_of(8, 8, classifier().prepare_spec))
