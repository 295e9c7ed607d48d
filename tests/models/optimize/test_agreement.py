"""Agreement on cases that can be counted by hand."""

import numpy as np
import pytest

from penstock.models.optimize.agreement import (
    class_agreement,
    detection_agreement,
    embedding_agreement,
    measure_agreement,
    segmentation_agreement,
)
from penstock.models.optimize.source import OptimizeError
from penstock.protocol.vision_results import Classes, DepthMap, Detections, Embedding, Mask, SegmentationMap


def boxes(*rows: tuple[float, float, float, float, int]) -> Detections:
    """Rows of x1 y1 x2 y2 class."""
    xyxy = np.array([row[:4] for row in rows], np.float32).reshape(-1, 4)
    return Detections(xyxy, np.ones(len(rows), np.float32), np.array([row[4] for row in rows], np.int64))


def classes(*ids: int) -> Classes:
    """Best first."""
    return Classes(np.ones(len(ids), np.float32), np.array(ids, np.int64))


def test_detection_agreement_counts_boxes_found_again_lost_and_new() -> None:
    """Found again: IoU of 0.5 or more and the same class; everything else is lost on one side or new on the other."""
    one = boxes((0, 0, 10, 10, 0), (20, 0, 30, 10, 0), (40, 0, 50, 10, 1))
    other = boxes((0, 0, 10, 5, 0), (24, 0, 34, 10, 0), (40, 0, 50, 10, 2), (60, 0, 70, 10, 0))
    found = detection_agreement([one], [other])  # IoU 0.5, 0.43, another class, nowhere
    assert (found.found_again, found.lost, found.new) == (1, 2, 3)
    assert found.share == 2 / 7


def test_detection_agreement_lets_a_box_answer_once() -> None:
    """Two boxes on one are one found again and one new, and the better overlap is the one that counts."""
    one, other = boxes((0, 0, 10, 10, 0)), boxes((0, 0, 10, 9, 0), (0, 0, 10, 10, 0))
    assert (detection_agreement([one], [other]).found_again, detection_agreement([one], [other]).new) == (1, 1)
    crossed = detection_agreement([boxes((0, 0, 10, 10, 0), (0, 0, 10, 8, 0))], [boxes((0, 0, 10, 8, 0))])
    assert (crossed.found_again, crossed.lost) == (1, 1)


def test_detection_agreement_of_empty_pictures_is_whole() -> None:
    """Where neither sees anything they agree; where one does, not."""
    assert detection_agreement([boxes()], [boxes()]).share == 1.0
    assert detection_agreement([boxes()], [boxes((0, 0, 1, 1, 0))]).share == 0.0


def test_class_agreement_looks_at_the_first_class() -> None:
    """Two pictures of three have the same first class; two that name none agree."""
    found = class_agreement([classes(1, 2), classes(3), classes()], [classes(1, 9), classes(2, 3), classes()])
    assert (found.pictures, found.same_top1) == (3, 2)


def test_embedding_agreement_is_the_cosine() -> None:
    """The mean and the worst picture; length does not matter, and a vector of zeros is like none."""
    one = [Embedding(np.array(vector, np.float32)) for vector in ([1, 0], [3, 4], [1, 1])]
    other = [Embedding(np.array(vector, np.float32)) for vector in ([2, 0], [4, 3], [0, 0])]
    found = embedding_agreement(one, other)
    assert (found.pictures, found.least_cosine) == (3, 0.0)
    assert found.mean_cosine == pytest.approx((1 + 0.96 + 0) / 3)
    assert embedding_agreement(one[:1], [Embedding(np.array([-1, 0], np.float32))]).share == 0.0


def test_segmentation_agreement_is_the_iou_of_each_class_over_all_pictures() -> None:
    """A class that only one of both shows has an IoU of 0; masks lie where they say."""

    def picture(*areas: tuple[int, int, int]) -> SegmentationMap:
        """(class, left, width) in a picture of 4 x 10, two rows from the second on."""
        masks = [Mask(4, 10, left, 1, np.ones((2, width), bool)) for _, left, width in areas]
        return SegmentationMap(4, 10, np.array([area[0] for area in areas], np.int64), masks)

    found = segmentation_agreement([picture((0, 0, 4), (2, 5, 2)), picture()], [picture((0, 2, 4)), picture((2, 0, 1))])
    assert dict(found.by_class) == {0: pytest.approx(2 / 6), 2: 0.0}
    assert found.share == pytest.approx(1 / 6)
    assert segmentation_agreement([picture()], [picture()]).share == 1.0


def test_results_without_a_measure_are_refused() -> None:
    """They are never counted as equal."""
    depth = DepthMap(np.zeros((2, 2), np.float32))
    with pytest.raises(OptimizeError, match="cannot be compared"):
        measure_agreement([depth], [depth])
