"""DeepStream's config_infer_primary.txt as a source of hints."""

from pathlib import Path

import pytest

from penstock.models.inspect.deepstream import NotDeepStream, hints_from_deepstream
from penstock.models.inspect.inspection import Hints, Verdict, merged
from tests.models.inspect.made_models import (
    centres,
    constant_model,
    inspected,
    joined,
    numbers,
    scores,
    transposed,
    whole,
)

# As the files of marcoslucianops/DeepStream-Yolo are, config_infer_primary_yoloV8.txt among them.
YOLOV8 = """[property]
gpu-id=0
net-scale-factor=0.0039215697906911373
model-color-format=0
onnx-file=yolov8s.onnx
#int8-calib-file=calib.table
labelfile-path=labels.txt
infer-dims=3;320;320
num-detected-classes=2
network-type=0
cluster-mode=2
maintain-aspect-ratio=1
symmetric-padding=1
parse-bbox-func-name=NvDsInferParseYolo
custom-lib-path=nvdsinfer_custom_impl_Yolo/libnvdsinfer_custom_impl_Yolo.so

[class-attrs-all]
nms-iou-threshold=0.5
pre-cluster-threshold=0.3
topk=300

[class-attrs-1]
pre-cluster-threshold=0.6
"""


def write(folder: Path, text: str, labels: str = "cat\ndog\n") -> Path:
    (folder / "labels.txt").write_text(labels)
    path = folder / "config_infer_primary.txt"
    path.write_text(text)
    return path


def test_a_detectors_file_becomes_hints(tmp_path: Path) -> None:
    """Size, colours, scale, padding, labels, thresholds and the parser's layout."""
    hints = hints_from_deepstream(write(tmp_path, YOLOV8)).hints
    assert (hints.layout, hints.input_size, hints.labels) == ("deepstream-yolo", (320, 320), ("cat", "dog"))
    assert (hints.color, hints.resize, hints.padding) == ("rgb", "letterbox", 0.0)
    assert (hints.conf, hints.iou) == (0.3, 0.5)
    assert hints.scale == pytest.approx(1 / 255, rel=1e-4)
    assert hints.parameters == {"class-thresholds": "1:0.6", "topk": "300"}


def test_offsets_are_nvinfers(tmp_path: Path) -> None:
    """net-scale-factor * (pixel - offset), as nvinfer computes it, is the card's arithmetic."""
    text = "[property]\nnet-scale-factor=0.0173520735728\noffsets=123.675;116.28;103.53\nmodel-color-format=1\n"
    hints = hints_from_deepstream(write(tmp_path, text)).hints
    rows = transposed(joined(centres(2100, 320), scores(2100, 80)))
    path = constant_model(tmp_path / "model.onnx", {"out": rows}, image=(1, 3, 320, 320))
    card = inspected(path, hints).recognition.parameters
    assert float(card["net-scale-factor"]) == pytest.approx(0.0173520735728)
    assert [float(part) for part in card["offsets"].split(";")] == pytest.approx([123.675, 116.28, 103.53])
    assert card["model-color-format"] == "1"
    assert "maintain-aspect-ratio" not in card


@pytest.mark.parametrize("parser", ["NvDsInferParseYolo", "NvDsInferParseYoloE"])
def test_boxes_that_the_files_parser_would_misread_are_asked(tmp_path: Path, parser: str) -> None:
    """The parser's name does not say whether boxes are corners: exports before November 2024 have centre and size."""
    hints = hints_from_deepstream(write(tmp_path, YOLOV8.replace("NvDsInferParseYolo\n", f"{parser}\n"))).hints
    assert hints.layout == "deepstream-yolo"
    rows = joined(centres(2100, 320), scores(2100, 1), whole(2100, 2))
    path = constant_model(tmp_path / "model.onnx", {"output": rows}, image=(1, 3, 320, 320))
    found = inspected(path, hints)
    question = found.recognition.blocking_questions[0]
    assert (question.flag, question.choices) == ("--layout", ("deepstream-yolo-cxcywh",))
    flag = Hints(layout="deepstream-yolo-cxcywh")
    assert inspected(path, merged(flag, hints)).verdict is Verdict.SERVABLE


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    """What the user says beside the file replaces the file's word."""
    hints = merged(Hints(conf=0.7, layout="yolov8"), hints_from_deepstream(write(tmp_path, YOLOV8)).hints)
    assert (hints.conf, hints.iou, hints.layout) == (0.7, 0.5, "yolov8")
    rows = transposed(joined(centres(2100, 320), scores(2100, 2)))
    found = inspected(constant_model(tmp_path / "model.onnx", {"out": rows}, image=(1, 3, 320, 320)), hints)
    assert found.verdict is Verdict.SERVABLE
    assert found.recognition.parameters["pre-cluster-threshold"] == "0.7"


def test_a_classifiers_file_names_its_labels_and_threshold(tmp_path: Path) -> None:
    """A classifier's labels are in one line with semicolons."""
    text = "[property]\nnetwork-type=1\nclassifier-threshold=0.51\nlabelfile-path=labels.txt\n"
    hints = hints_from_deepstream(write(tmp_path, text, "red;green;blue\n")).hints
    assert (hints.layout, hints.labels) == ("classification", ("red", "green", "blue"))
    assert hints.parameters == {"classifier-threshold": "0.51"}
    path = constant_model(tmp_path / "model.onnx", {"out": numbers(1, 3, low=-3, high=3)}, image=(1, 3, 224, 224))
    assert inspected(path, hints).verdict is Verdict.SERVABLE


def test_what_is_not_used_is_said(tmp_path: Path) -> None:
    """A library's parser and another clustering are named."""
    text = "[property]\nparse-bbox-func-name=NvDsInferParseOurs\ncluster-mode=1\n"
    unused = hints_from_deepstream(write(tmp_path, text)).unused
    assert any("NvDsInferParseOurs" in sentence for sentence in unused)
    assert any("cluster-mode 1" in sentence for sentence in unused)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("just text", "not a configuration"),
        ("[primary-gie]\nenable=1\n", r"\[property\]"),
        ("[property]\nnet-scale-factor=abc\n", "net-scale-factor"),
        ("[property]\nnet-scale-factor=nan\n", "net-scale-factor"),
        ("[property]\nnet-scale-factor=0\n", "net-scale-factor"),
        ("[property]\noffsets=1;x;3\n", "offsets"),
        ("[property]\n[class-attrs-all]\npre-cluster-threshold=7\n", "between 0 and 1"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """The file's name, the key and its value."""
    with pytest.raises(NotDeepStream, match=sentence):
        hints_from_deepstream(write(tmp_path, text))
