"""Agreement of two engines' results: classes, boxes, and other kinds."""

import numpy as np
import pytest

from penstock.models.check.answers import AnswerAgreement, compare_answers, rivals_of
from penstock.protocol.vision_results import Classes, DepthMap, Detections, Embedding, TextLine, TextLines, VisionResult


def classes(*scores: tuple[int, float]) -> Classes:
    return Classes(np.array([s for _, s in scores], np.float32), np.array([c for c, _ in scores], np.int64))


def boxes(*rows: tuple[int, float, tuple[float, float, float, float]]) -> Detections:
    return Detections(
        np.array([box for _, _, box in rows], np.float32).reshape(-1, 4),
        np.array([score for _, score, _ in rows], np.float32),
        np.array([class_id for class_id, _, _ in rows], np.int64),
    )


def compared(one: VisionResult, two: VisionResult) -> AnswerAgreement:
    return compare_answers([one], [two], threshold=0.25)


def test_top_class_of_a_near_tie_is_left_out() -> None:
    """A picture whose two best scores differ by less than 0.001 is counted as a tie and not compared."""
    near, clear = classes((3, 0.4002), (5, 0.3998)), classes((3, 0.5), (5, 0.3))
    other = classes((5, 0.4), (3, 0.39))
    found = compare_answers([near, clear, clear], [other, clear, other], threshold=0.0)
    assert (found.ties, found.compared, found.same) == (1, 2, 1)
    assert found.top1 == 0.5
    assert "50.00%" in found.disagreement


def test_boxes_are_matched_by_class_and_overlap() -> None:
    """Each box pairs with the box of its class that overlaps most, and a box of another class is unmatched."""
    one = boxes((0, 0.9, (0, 0, 100, 100)), (0, 0.8, (0, 0, 100, 80)), (1, 0.7, (200, 0, 300, 100)))
    two = boxes((0, 0.9, (0, 0, 100, 81)), (0, 0.8, (0, 0, 100, 99)), (2, 0.7, (200, 0, 300, 100)))
    found = compared(one, two)
    assert sorted(found.overlaps) == pytest.approx([80 / 81, 0.99], abs=1e-4)
    assert (found.boxes, found.unmatched, found.borderline) == (3, 2, 0)
    assert found.disagreement == "2 of 3 boxes are missing or new"


def test_box_near_the_threshold_may_be_missing() -> None:
    """A box of one engine alone whose score is within 0.02 of the threshold is borderline, and the answers agree."""
    found = compared(boxes((0, 0.9, (0, 0, 50, 50)), (0, 0.265, (90, 90, 99, 99))), boxes((0, 0.9, (0, 0, 50, 50))))
    assert (found.unmatched, found.borderline, found.disagreement) == (0, 1, "")
    assert str(found) == "1 boxes overlap at least 1.000"


def test_box_for_which_nms_chose_its_rival_is_left_out() -> None:
    """Of two boxes of one object with nearly the same score, the other engine may keep the other one."""
    first, second = (0, 0.7004, (0, 0, 50, 50)), (0, 0.7001, (8, 0, 58, 50))
    rivals = rivals_of(boxes(first), boxes(first, second), iou=0.45)
    assert (rivals.box.tolist(), rivals.xyxy.tolist()) == ([0], [[8, 0, 58, 50]])
    switched = compare_answers([boxes(first)], [boxes(second)], threshold=0.25, rivals=[rivals])
    assert (switched.switched, switched.overlaps, switched.unmatched, switched.box_share) == (1, (), 0, 1.0)
    assert str(switched) == "0 boxes overlap at least 1.000 (1 left out: NMS chose a box of the same score)"
    moved = compare_answers([boxes(first)], [boxes((0, 0.7, (4, 0, 54, 50)))], threshold=0.25, rivals=[rivals])
    assert (moved.switched, moved.box_share) == (0, 0.0)


@pytest.mark.parametrize(
    "candidate",
    [(0, 0.69, (8, 0, 58, 50)), (1, 0.7001, (8, 0, 58, 50)), (0, 0.7001, (40, 0, 90, 50)), (0, 0.7001, (0, 0, 50, 50))],
    ids=["lower-score", "other-class", "other-object", "same-box"],
)
def test_rivals_have_the_score_and_class_of_their_box(
    candidate: tuple[int, float, tuple[float, float, float, float]],
) -> None:
    """A dropped box with a lower score or of another class is no rival, nor is a box that NMS keeps."""
    assert not len(rivals_of(boxes((0, 0.7004, (0, 0, 50, 50))), boxes(candidate), iou=0.45).box)


def test_share_of_boxes_counts_boxes_without_partner() -> None:
    """Of three boxes, one has a partner that overlaps enough, one a worse partner, and one none."""
    one = boxes((0, 0.9, (0, 0, 50, 50)), (0, 0.8, (100, 0, 150, 50)), (0, 0.7, (200, 0, 250, 50)))
    found = compared(one, boxes((0, 0.9, (0, 0, 50, 50)), (0, 0.8, (102, 0, 152, 50))))
    assert found.box_share == pytest.approx(1 / 3)


def test_shifted_boxes_disagree() -> None:
    """Boxes that overlap less than 0.98 in their 1st percentile are not good enough."""
    found = compared(boxes((0, 0.9, (0, 0, 50, 50))), boxes((0, 0.9, (2, 0, 52, 50))))
    assert found.disagreement == "boxes overlap 0.923 (1st percentile), 0.98 is needed"


@pytest.mark.parametrize(
    ("one", "two", "is_good"),
    [
        (Embedding(np.ones(4, np.float32)), Embedding(np.full(4, 1.001, np.float32)), True),
        (Embedding(np.ones(4, np.float32)), Embedding(np.array([1, 1, 1, 1.2], np.float32)), False),
        (TextLines((TextLine("car", 0.9),)), TextLines((TextLine("cat", 0.9),)), False),
        (DepthMap(np.eye(4, dtype=np.float32)), DepthMap(np.eye(4, dtype=np.float32) * 1.001), True),
        (DepthMap(np.eye(4, dtype=np.float32)), DepthMap(np.zeros((4, 4), np.float32)), False),
    ],
    ids=["vector", "turned-vector", "text", "depth", "no-depth"],
)  # fmt: skip
def test_other_results_are_compared_by_likeness(one: VisionResult, two: VisionResult, is_good: bool) -> None:
    """Vectors, lines and depth maps that differ by rounding agree, and others do not."""
    assert (not compared(one, two).disagreement) is is_good


def test_results_of_different_kinds_are_refused() -> None:
    """A list of classes cannot be compared with boxes."""
    with pytest.raises(ValueError, match="Detections cannot be compared with one of type Classes"):
        compared(classes((0, 0.9)), boxes())
