"""Agreement on cases that can be counted by hand."""

import numpy as np

from penstock.models.optimize.agreement import class_agreement, detection_agreement
from penstock.protocol.vision_results import Classes, Detections


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
