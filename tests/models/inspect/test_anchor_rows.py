"""YOLO's outputs: every row of the tables of LAYOUTS.md, and the pairs that look alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.models.inspect.inspection import Hints, Verdict
from tests.models.inspect.made_models import (
    Array,
    asked,
    cells,
    centres,
    constant_model,
    corners,
    inspected,
    joined,
    numbers,
    scores,
    transposed,
    ultralytics,
    whole,
)

N640, N416, N320, N192 = (cells(size) for size in (640, 416, 320, 192))
LETTERBOX = {"maintain-aspect-ratio": "1", "symmetric-padding": "1", "padding-value": "114"}
RGB = {**LETTERBOX, "model-color-format": "0", "net-scale-factor": "0.0039215686274509803"}
RAW_BGR = {"maintain-aspect-ratio": "1", "padding-value": "114", "model-color-format": "1", "net-scale-factor": "1"}
TWO = ("cat", "dog")


@dataclass(frozen=True)
class Row:
    """A file, and what is to be recognised."""

    layout: str
    outputs: Mapping[str, Array]
    size: int = 640
    metadata: Mapping[str, str] = field(default_factory=dict)
    card: Mapping[str, str] = field(default_factory=dict)
    labels: int = 80
    hints: Hints = field(default_factory=Hints)
    shapes: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    rows_follow_batch: bool = True


def raw(count: int, size: int, classes: int) -> Array:
    """YOLOX's rows: offsets, logarithms of sides, objectness, classes."""
    return joined(numbers(count, 2), numbers(count, 2, low=-1.6, high=3.4), scores(count, 1), scores(count, classes))


def pose(count: int, points: int, values: int) -> Array:
    spots = numbers(count, points, values) * 640
    if values == 3:
        spots[..., 2] /= 640
    return joined(centres(count, 640), scores(count, 1), spots)


def final(count: int, *more: Array) -> Array:
    falling = np.sort(numbers(count, 1), axis=0)[::-1]
    return joined(corners(count, 640), falling, whole(count, 2), *more)


def seven(*, class_column: int) -> Array:
    """(9, 7): image, corners, and the class and the score in columns 5 and 6."""
    columns = [whole(9, 4), scores(9, 1)] if class_column == 5 else [scores(9, 1), whole(9, 4)]
    return np.concatenate([np.zeros((9, 1)), corners(9, 640), *columns], 1, dtype=np.float32)


def turned(count: int) -> Array:
    return joined(centres(count, 640), np.sort(numbers(count, 1), axis=0)[::-1], whole(count, 2), numbers(count, 1) * 9)


PROTOTYPES = numbers(1, 32, 160, 160, low=-1)
ANGLES = numbers(N640, 1, low=-0.78, high=2.35)
COEFFICIENTS = numbers(N640, 32, low=-1)
KPT = {"kpt_shape": "[17, 3]"}
ROWS: dict[str, Row] = {
    "yolov8": Row(
        "yolov8", {"output0": transposed(joined(centres(N640, 640), scores(N640, 2)))},
        metadata=ultralytics("detect", TWO, (640, 640)), card=RGB, labels=2,
    ),
    "yolov8 without metadata": Row(
        "yolov8", {"output0": transposed(joined(centres(N640, 640), scores(N640, 80)))}, card=RGB
    ),
    "yolov8 transposed": Row("yolov8", {"output0": joined(centres(N640, 640), scores(N640, 80))}, card=RGB),
    "yolov8 with 81 names": Row(
        "yolov8", {"output0": transposed(joined(centres(N640, 640), scores(N640, 81)))},
        metadata=ultralytics("detect", [f"c{number}" for number in range(81)], (640, 640)), labels=81,
    ),
    "yolov5": Row(
        "yolov5", {"output": joined(centres(3 * N640, 640), scores(3 * N640, 81))},
        metadata={"stride": "32", "names": str([f"c{number}" for number in range(80)])}, card=RGB,
    ),
    "yolov5 without metadata": Row(
        "yolov5", {"output": joined(centres(3 * N320, 320), scores(3 * N320, 81))}, size=320, card=RGB
    ),
    "yolov5 of one class": Row(
        "yolov5", {"output": joined(centres(3 * N320, 320), scores(3 * N320, 2))}, size=320, labels=0
    ),
    "yolox": Row("yolox", {"output": raw(N416, 416, 80)}, size=416, card=RAW_BGR),
    "yolox with stride 64": Row(
        "yolox", {"output": raw(cells(640, (8, 16, 32, 64)), 640, 80)}, size=640, card=RAW_BGR
    ),
    "yolox of one class": Row("yolox", {"output": raw(N416, 416, 1)}, size=416, card=RAW_BGR, labels=0),
    "yolox of one class at 192": Row("yolox", {"output": raw(N192, 192, 1)}, size=192, card=RAW_BGR, labels=0),
    "yolox decoded": Row(
        "yolov5", {"output": joined(centres(N416, 416), scores(N416, 81))}, size=416, card=RAW_BGR
    ),
    "yolov6": Row(
        "yolov5", {"outputs": joined(centres(N640, 640), np.ones((N640, 1)), scores(N640, 80))}, card=RGB
    ),
    "deepstream-yolo": Row(
        "deepstream-yolo", {"output": joined(corners(N640, 640), scores(N640, 1), whole(N640, 4))}, card=RGB, labels=0
    ),
    "deepstream-yolo of three anchors": Row(
        "deepstream-yolo", {"output": joined(corners(3 * N640, 640), scores(3 * N640, 1), whole(3 * N640, 4))},
        card=RGB, labels=0,
    ),
    "deepstream-yolo of centres": Row(
        "deepstream-yolo-cxcywh", {"output": joined(centres(N640, 640), scores(N640, 1), whole(N640, 4))},
        card={**RGB, "nms-iou-threshold": "0.45"}, labels=0,
    ),
    "deepstream-yolo of three outputs": Row(
        "deepstream-yolo-cxcywh",
        {
            "boxes": centres(N640, 640)[np.newaxis], "scores": scores(N640, 1)[np.newaxis],
            "classes": whole(N640, 4)[np.newaxis],
        },
        shapes={"boxes": (1, N640, 4)}, card=RGB, labels=0,
    ),
    "deepstream-yolo of three outputs with corners": Row(
        "deepstream-yolo",
        {
            "boxes": corners(N640, 640)[np.newaxis], "scores": scores(N640, 1)[np.newaxis],
            "classes": whole(N640, 4)[np.newaxis],
        },
        card=RGB, labels=0,
    ),
    "yolo-end2end": Row(
        "yolo-end2end", {"output0": final(300)},
        metadata=ultralytics("detect", TWO, (640, 640), end2end="True"), card=RGB, labels=2,
    ),
    "yolo-end2end without metadata": Row("yolo-end2end", {"output0": final(300)}, card=RGB, labels=0),
    "yolov7-nms": Row(
        "yolov7-nms", {"output": seven(class_column=5)}, shapes={"output": ("Concatoutput_dim_0", 7)},
        card=RGB, labels=0, rows_follow_batch=False,
    ),
    "yolo-nas": Row(
        "yolo-nas", {"904": corners(N640, 640)[np.newaxis], "913": scores(N640, 80)[np.newaxis]},
        card={**RGB, "nms-iou-threshold": "0.45"},
    ),
    "yolo-nas with the scores first": Row(
        "yolo-nas", {"pred_scores": scores(N640, 4)[np.newaxis], "pred_boxes": corners(N640, 640)[np.newaxis]},
        card={**RGB, "output-blob-names": "pred_boxes;pred_scores"}, labels=0,
    ),
    "yolo-nas of two classes": Row(
        "yolo-nas", {"scores": scores(N640, 2)[np.newaxis], "boxes": corners(N640, 640)[np.newaxis]},
        card=RGB, labels=0,
    ),
    "yolo-nas in the flat format": Row(
        "yolo-nas-flat", {"graph2_flat_predictions": seven(class_column=6)},
        shapes={"graph2_flat_predictions": ("Concatoutput_dim_0", 7)}, card=RGB, labels=0, rows_follow_batch=False,
    ),
    "yolo-nas in the flat format without its name": Row(
        "yolo-nas-flat", {"output": seven(class_column=6)}, shapes={"output": ("rows", 7)}, card=RGB, labels=0,
        rows_follow_batch=False,
    ),
    "yolo-nas in the batch format": Row(
        "efficient-nms",
        {
            "graph2_num_predictions": np.array([[3]]), "graph2_pred_boxes": corners(100, 640)[np.newaxis],
            "graph2_pred_scores": np.sort(numbers(1, 100))[:, ::-1].copy(),
            "graph2_pred_classes": whole(100, 4).astype(np.int64).reshape(1, -1),
        },
        card=RGB, labels=0,
    ),
    "yolov8-seg": Row(
        "yolov8-seg",
        {"output0": transposed(joined(centres(N640, 640), scores(N640, 2), COEFFICIENTS)), "output1": PROTOTYPES},
        metadata=ultralytics("segment", TWO, (640, 640)), card=RGB, labels=2,
    ),
    "yolov8-seg without metadata": Row(
        "yolov8-seg",
        {"output0": transposed(joined(centres(N640, 640), scores(N640, 80), COEFFICIENTS)), "output1": PROTOTYPES},
        card=RGB,
    ),
    "yolo-end2end-seg": Row(
        "yolo-end2end-seg", {"output0": final(300, numbers(300, 32, low=-1)), "output1": PROTOTYPES},
        metadata=ultralytics("segment", TWO, (640, 640), end2end="True"), labels=2,
    ),
    "yolov5-seg": Row(
        "yolov5-seg",
        {
            "output0": joined(centres(3 * N640, 640), scores(3 * N640, 81), numbers(3 * N640, 32, low=-1)),
            "output1": PROTOTYPES,
        },
        metadata={"stride": "32", "names": str([f"c{number}" for number in range(80)])}, card=RGB,
    ),
    "yolov8-pose": Row(
        "yolov8-pose", {"output0": transposed(pose(N640, 17, 3))},
        metadata=ultralytics("pose", ["person"], (640, 640), **KPT), card={**RGB, "keypoint-shape": "17;3"}, labels=1,
    ),
    "yolov8-pose without metadata": Row(
        "yolov8-pose", {"output0": transposed(pose(N640, 17, 3))}, card={"keypoint-shape": "17;3"}, labels=1
    ),
    "yolov8-pose of two values": Row(
        "yolov8-pose", {"output0": transposed(pose(N640, 4, 2))},
        metadata=ultralytics("pose", ["plate"], (640, 640), kpt_shape="[4, 2]"), card={"keypoint-shape": "4;2"},
        labels=1,
    ),
    "yolo-end2end-pose": Row(
        "yolo-end2end-pose", {"output0": final(300, numbers(300, 51) * 640)},
        metadata=ultralytics("pose", ["person"], (640, 640), end2end="True", **KPT),
        card={"keypoint-shape": "17;3"}, labels=1,
    ),
    "yolov8-obb": Row(
        "yolov8-obb", {"output0": transposed(joined(centres(N640, 640), scores(N640, 2), ANGLES))},
        metadata=ultralytics("obb", TWO, (640, 640)), card=RGB, labels=2,
    ),
    "yolov8-obb without metadata": Row(
        "yolov8-obb", {"output0": transposed(joined(centres(N640, 640), scores(N640, 15), ANGLES))}, labels=0
    ),
    "yolo-end2end-obb": Row(
        "yolo-end2end-obb", {"output0": turned(300)},
        metadata=ultralytics("obb", TWO, (640, 640), end2end="True"), labels=2,
    ),
    "rt-detr-ultralytics": Row(
        "rt-detr-ultralytics", {"output0": joined(centres(300, 1), scores(300, 2))},
        metadata=ultralytics("detect", TWO, (640, 640)),
        card={"model-color-format": "0", "net-scale-factor": "0.0039215686274509803"}, labels=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_outputs_of_yolo_are_recognised_without_a_flag(tmp_path: Path, name: str) -> None:
    """Layout, preprocessing and labels of each row of LAYOUTS.md's tables; nothing is asked."""
    row = ROWS[name]
    path = constant_model(
        tmp_path / "model.onnx", row.outputs, image=(1, 3, row.size, row.size), metadata=row.metadata, shapes=row.shapes
    )
    found = inspected(path, row.hints)
    assert (found.recognition.layout, found.verdict) == (row.layout, Verdict.SERVABLE), found.reason
    assert {key: found.recognition.parameters.get(key) for key in row.card} == row.card
    assert len(found.recognition.labels) == row.labels
    assert found.recognition.input_size == (row.size, row.size)
    assert found.recognition.rows_follow_batch is row.rows_follow_batch
    assert found.trial.is_decoded


def test_a_free_size_is_the_metadatas(tmp_path: Path) -> None:
    """A graph of any height and width is served at Ultralytics' imgsz."""
    path = constant_model(
        tmp_path / "model.onnx",
        {"output0": transposed(joined(centres(N320, 320), scores(N320, 2)))},
        image=("batch", 3, "height", "width"),
        shapes={"output0": ("batch", 6, "anchors")},
        metadata=ultralytics("detect", TWO, (320, 320)),
    )
    found = inspected(path)
    assert (found.verdict, found.recognition.input_size) == (Verdict.SERVABLE, (320, 320))
    assert found.recognition.parameters["infer-dims"] == "3;320;320"


def test_a_free_size_without_metadata_is_asked(tmp_path: Path) -> None:
    """The question names --input-size, which settles it."""
    path = constant_model(
        tmp_path / "model.onnx",
        {"output0": transposed(joined(centres(N320, 320), scores(N320, 80)))},
        image=("batch", 3, "height", "width"),
        shapes={"output0": ("batch", 84, "anchors")},
    )
    assert asked(inspected(path)) == ["--input-size"]
    found = inspected(path, Hints(input_size=(320, 320)))
    assert (found.verdict, found.recognition.layout) == (Verdict.SERVABLE, "yolov8")


def test_unknown_numbers_of_columns_are_asked_and_labels_settle_them(tmp_path: Path) -> None:
    """Rows first with 12 columns are 7 classes with objectness, or 8 without: the number of labels tells."""
    path = constant_model(tmp_path / "model.onnx", {"output": raw(N416, 416, 7)})
    found = inspected(path)
    assert (found.verdict, asked(found)) == (Verdict.AMBIGUOUS, ["--labels"])
    seven, eight = (tuple(f"c{number}" for number in range(count)) for count in (7, 8))
    assert inspected(path, Hints(labels=seven)).recognition.layout == "yolox"
    assert inspected(path, Hints(labels=eight)).recognition.layout == "yolov8"


@pytest.mark.parametrize("layout", ["", "yolox"])
def test_wrong_number_of_labels_is_named_with_the_number_of_classes(tmp_path: Path, layout: str) -> None:
    """The question states both numbers, with or without a layout, and where labels of a file are from."""
    path = constant_model(tmp_path / "model.onnx", {"output": raw(N416, 416, 80)})
    found = inspected(path, Hints(labels=("helmet", "vest"), layout=layout))
    assert asked(found) == ["--labels"]
    assert "2 labels are given, but the model has 80 classes" in found.reason
    found = inspected(path, Hints(labels=("helmet",), labels_origin="ppe.names", layout=layout))
    assert "1 label is given in ppe.names, but the model has 80 classes" in found.reason


def test_wrong_number_of_labels_for_columns_of_two_readings_is_named_with_both(tmp_path: Path) -> None:
    """Rows of 12 columns have 7 or 8 classes: two labels fit neither."""
    path = constant_model(tmp_path / "model.onnx", {"output": raw(N416, 416, 7)})
    found = inspected(path, Hints(labels=("helmet", "vest")))
    assert asked(found) == ["--labels"]
    assert "2 labels are given; 12 columns are 7 classes with objectness" in found.reason


def test_maps_without_a_grid_say_how_to_export(tmp_path: Path) -> None:
    """YOLOv5's training outputs need anchors that are not in the file."""
    maps = {f"out{side}": numbers(1, 3, side, side, 85) for side in (80, 40, 20)}
    found = inspected(constant_model(tmp_path / "model.onnx", maps, image=(1, 3, 640, 640)))
    assert found.verdict is Verdict.AMBIGUOUS
    assert "--grid" in found.reason


def test_labels_beside_the_file_are_taken(tmp_path: Path) -> None:
    """One file of as many names as the network has classes, as DeepStream-Yolo's exporters write it."""
    (tmp_path / "labels.txt").write_text("bolt\nnut\nwasher\n")
    path = constant_model(tmp_path / "model.onnx", {"output": raw(N416, 416, 3)})
    found = inspected(path)
    assert (found.verdict, found.recognition.labels) == (Verdict.SERVABLE, ("bolt", "nut", "washer"))
    assert any("labels.txt" in sentence for sentence in found.recognition.evidence)


def test_a_wrong_number_of_labels_is_asked(tmp_path: Path) -> None:
    """--labels with other than the network's classes is refused with both numbers."""
    path = constant_model(tmp_path / "model.onnx", {"output": raw(N416, 416, 80)})
    found = inspected(path, Hints(labels=("a", "b")))
    assert found.verdict is Verdict.AMBIGUOUS
    assert "--l" in found.reason


@pytest.mark.parametrize(("rows", "is_blocking"), [(np.zeros((0, 7)), False), (np.ones((9, 7)), True)])
def test_rows_that_do_not_show_which_column_is_the_class_are_asked(
    tmp_path: Path, rows: Array, is_blocking: bool
) -> None:
    """[M, 7] is YOLOv7's or SuperGradients'; without rows the usual one is used, and the question names --layout."""
    outputs = {"output": rows.astype(np.float32)}
    path = constant_model(
        tmp_path / "model.onnx", outputs, image=(1, 3, 640, 640), shapes={"output": ("rows", 7)}
    )  # fmt: skip
    found = inspected(path).recognition
    question = next(one for one in found.questions if one.flag == "--layout")
    assert (question.choices, question.is_blocking) == (("yolov7-nms", "yolo-nas-flat"), is_blocking)


@pytest.mark.parametrize("boxes", ["fractions", "centres"])
def test_boxes_of_yolo_nas_in_another_form_are_reported(tmp_path: Path, boxes: str) -> None:
    """Fractions of the picture, or centres and sizes, are never decoded as corners in pixels."""
    made = corners(N640, 1) if boxes == "fractions" else centres(N640, 640)
    outputs = {"boxes": made[np.newaxis], "scores": scores(N640, 80)[np.newaxis]}
    found = inspected(constant_model(tmp_path / "model.onnx", outputs, image=(1, 3, 640, 640)))
    assert (found.verdict, asked(found)) == (Verdict.AMBIGUOUS, ["--layout"])


@pytest.mark.parametrize(("kind", "flag"), [("parts", "--layout"), ("corners", "--layout")])
def test_boxes_that_the_layout_does_not_have_are_reported(tmp_path: Path, kind: str, flag: str) -> None:
    """Parts of 1, or corners, where YOLOv8 has centres and sizes in pixels, are never decoded silently."""
    boxes = centres(N640, 1) if kind == "parts" else corners(N640, 640)
    rows = transposed(joined(boxes, scores(N640, 2)))
    path = constant_model(
        tmp_path / "model.onnx", {"output0": rows}, image=(1, 3, 640, 640),
        metadata=ultralytics("detect", TWO, (640, 640)),
    )  # fmt: skip
    found = inspected(path)
    assert (found.verdict, asked(found)) == (Verdict.AMBIGUOUS, [flag])


def test_missing_sigmoids_are_seen(tmp_path: Path) -> None:
    """Scores below 0 are logits: the card applies the sigmoid, and the page names it."""
    logits = transposed(joined(centres(N640, 640), numbers(N640, 80, low=-9, high=3)))
    found = inspected(constant_model(tmp_path / "model.onnx", {"output0": logits}, image=(1, 3, 640, 640)))
    assert found.recognition.parameters["apply-sigmoid"] == "1"
    assert any("logits" in sentence for sentence in found.recognition.evidence)


def test_scores_that_are_all_zero_are_said(tmp_path: Path) -> None:
    """A file quantised with boxes and scores in one scale can answer nothing, and is not servable."""
    rows = transposed(joined(centres(N640, 640), np.zeros((N640, 80))))
    found = inspected(constant_model(tmp_path / "model.onnx", {"output0": rows}, image=(1, 3, 640, 640)))
    assert found.verdict is Verdict.UNSERVABLE
    assert "all scores are 0" in found.reason


def test_values_that_are_not_finite_are_said(tmp_path: Path) -> None:
    """NaN in an output is one sentence."""
    rows: Any = joined(centres(N640, 640), scores(N640, 80))
    rows[0, 5, 7] = np.nan
    found = inspected(constant_model(tmp_path / "model.onnx", {"output0": rows}, image=(1, 3, 640, 640)))
    assert (found.verdict, "NaN" in found.reason) == (Verdict.UNSERVABLE, True)
