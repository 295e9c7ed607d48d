"""Average precision on cases whose answer is known by hand, and annotations in COCO's format."""

from pathlib import Path

import numpy as np
import pytest

from penstock.protocol.vision_results import Detections
from penstock.vision.accuracy import Truth, average_precision, read_annotations, write_annotations

HALF_RECALL = 51 / 101  # the recalls 0, 0.01 … 0.5 of COCO's 101

Box = tuple[float, float, float, float]
LEFT, RIGHT, FAR = (0.0, 0.0, 10.0, 10.0), (20.0, 0.0, 30.0, 10.0), (60.0, 0.0, 70.0, 10.0)


def truth(*boxes: tuple[Box, int], ignored: tuple[int, ...] = ()) -> Truth:
    """Boxes with their classes; ignored: the places of those that do not count."""
    return Truth(
        np.array([box for box, _ in boxes], np.float32).reshape(-1, 4),
        np.array([class_id for _, class_id in boxes], np.int64),
        np.isin(np.arange(len(boxes)), ignored),
    )


def found(*boxes: tuple[Box, int, float]) -> Detections:
    """Boxes with class and score."""
    return Detections(
        np.array([box for box, _, _ in boxes], np.float32).reshape(-1, 4),
        np.array([score for _, _, score in boxes], np.float32),
        np.array([class_id for _, class_id, _ in boxes], np.int64),
    )


@pytest.mark.parametrize(
    ("wanted", "given", "mean"),
    [
        (truth((LEFT, 0), (RIGHT, 0)), found((LEFT, 0, 0.9), (RIGHT, 0, 0.8)), 1.0),
        (truth((LEFT, 0), (RIGHT, 0)), found((LEFT, 0, 0.9)), HALF_RECALL),
        (truth((LEFT, 0), (RIGHT, 0)), found(), 0.0),
        (truth((LEFT, 0)), found((FAR, 0, 0.9), (LEFT, 0, 0.8)), 0.5),  # wrong first: precision 1 of 2
        (truth((LEFT, 0)), found((LEFT, 0, 0.9), (FAR, 0, 0.8)), 1.0),  # wrong last: full recall was reached before
        (truth((LEFT, 0)), found((LEFT, 0, 0.9), (LEFT, 0, 0.8), (FAR, 0, 0.7)), 1.0),
        (truth((LEFT, 0), (RIGHT, 0)), found((LEFT, 0, 0.9), (LEFT, 0, 0.8), (RIGHT, 0, 0.7)), (51 + 50 * 2 / 3) / 101),
        (truth((LEFT, 0)), found((LEFT, 1, 0.9)), 0.0),  # the right place, the wrong class
        (truth((LEFT, 0)), found(((0.0, 0.0, 10.0, 5.1), 0, 0.9)), 1.0),  # IoU 0.51
        (truth((LEFT, 0)), found(((0.0, 0.0, 10.0, 4.9), 0, 0.9)), 0.0),  # IoU 0.49
    ],
)
def test_average_precision_of_one_image_is_what_a_hand_computes(wanted: Truth, given: Detections, mean: float) -> None:
    """Found, missed, doubled, misplaced and misnamed boxes cost what COCO's definition says."""
    assert average_precision([wanted], [given], class_count=2).mean == pytest.approx(mean)


def test_average_precision_ranks_the_boxes_of_all_images_together() -> None:
    """A confident mistake in one image costs a right box in another."""
    result = average_precision(
        [truth((LEFT, 0)), truth()], [found((LEFT, 0, 0.5)), found((FAR, 0, 0.9))], class_count=1
    )
    assert result.mean == pytest.approx(0.5)


def test_average_precision_is_the_mean_over_the_classes_that_are_there() -> None:
    """A class without truth has no figure and no weight, even where it is found."""
    wanted = truth((LEFT, 0), (RIGHT, 2))
    result = average_precision([wanted], [found((LEFT, 0, 0.9), (FAR, 1, 0.9))], class_count=3)
    assert result.by_class == pytest.approx((1.0, None, 0.0))
    assert result.mean == pytest.approx(0.5)


def test_ignored_boxes_are_neither_missed_nor_wrong() -> None:
    """Without them, with them found, and with them found twice the figure is the same."""
    wanted = truth((LEFT, 0), (RIGHT, 0), ignored=(1,))
    for more in ((), ((RIGHT, 0, 0.95),), ((RIGHT, 0, 0.95), ((21.0, 1.0, 29.0, 9.0), 0, 0.94))):
        assert average_precision([wanted], [found((LEFT, 0, 0.9), *more)], class_count=1).mean == pytest.approx(1.0)
    assert average_precision([wanted], [found((LEFT, 0, 0.9), (FAR, 0, 0.95))], class_count=1).mean == pytest.approx(
        0.5
    )


def test_a_crowd_of_more_than_a_hundred_is_evaluated_whole() -> None:
    """COCO's usual cut at 100 boxes an image is lifted."""
    boxes = [((float(x), 0.0, float(x) + 5, 5.0), 0) for x in range(0, 3000, 10)]
    result = average_precision([truth(*boxes)], [found(*((box, 0, 0.5) for box, _ in boxes))], class_count=1)
    assert result.mean == pytest.approx(1.0)


def test_what_cannot_be_evaluated_is_refused() -> None:
    """Unequal lengths, unknown classes, no truth at all, boxes that are none."""
    with pytest.raises(ValueError, match="1 images of truth, 0 of detections"):
        average_precision([truth((LEFT, 0))], [], class_count=1)
    with pytest.raises(ValueError, match=r"class ids \[3\] are not all under 3"):
        average_precision([truth((LEFT, 0))], [found((LEFT, 3, 0.5))], class_count=3)
    with pytest.raises(ValueError, match="no box that counts"):
        average_precision([truth((LEFT, 0), ignored=(0,))], [found()], class_count=1)
    with pytest.raises(ValueError, match=r"need boxes of shape \(2, 4\)"):
        Truth(np.zeros((1, 4), np.float32), np.zeros(2, np.int64))


def test_evaluation_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """pycocotools' progress stays away from the user."""
    average_precision([truth((LEFT, 0))], [found((LEFT, 0, 0.9))], class_count=1)
    assert capsys.readouterr() == ("", "")


def test_annotations_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Boxes, classes, what is ignored, and images without a box."""
    written = {"b.jpg": truth((LEFT, 2), (RIGHT, 0), ignored=(0,)), "a.jpg": truth()}
    write_annotations(tmp_path, written, labels=("person", "bicycle", "car"), sizes=dict.fromkeys(written, (640, 360)))
    read = read_annotations(tmp_path)
    assert list(read) == ["b.jpg", "a.jpg"]
    for name, boxes in written.items():
        assert read[name].xyxy.tolist() == boxes.xyxy.tolist()
        assert read[name].class_id.tolist() == boxes.class_id.tolist()
        assert read[name].ignored.tolist() == boxes.ignored.tolist()
        assert [str(array.dtype) for array in (read[name].xyxy, read[name].class_id)] == ["float32", "int64"]


def test_annotations_of_others_count_their_categories_by_id(tmp_path: Path) -> None:
    """COCO's ids have gaps; class ids have none. Unknown fields are ignored."""
    (tmp_path / "annotations.json").write_text(
        """{"info": {}, "images": [{"id": 9, "file_name": "x.png", "license": 1}],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 3, "name": "car", "supercategory": "vehicle"}],
        "annotations": [{"id": 5, "image_id": 9, "category_id": 90, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 0}]}"""
    )
    read = read_annotations(tmp_path)
    assert (read["x.png"].class_id.tolist(), read["x.png"].xyxy.tolist()) == ([1], [[1, 2, 4, 6]])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "not in COCO's format"),
        ('{"images": [], "categories": []}', "not in COCO's format: .*annotations"),
        (
            '{"images": [], "categories": [], "annotations": '
            '[{"id": 1, "image_id": 7, "category_id": 2, "bbox": [0, 0, 1, 1], "area": 1}]}',
            "names image 7 and category 2",
        ),
    ],
)
def test_annotations_that_are_none_are_refused_by_name(tmp_path: Path, text: str, sentence: str) -> None:
    """The file is named, and what is wrong with it."""
    (tmp_path / "annotations.json").write_text(text)
    with pytest.raises(ValueError, match=f"annotations.json.*{sentence}"):
        read_annotations(tmp_path)
