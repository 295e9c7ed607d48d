"""Metadata of OpenVINO's Model API in the file, and Open Model Zoo's files beside it."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from penstock.models.inspect.inspection import Hints, Verdict
from penstock.models.inspect.open_model_zoo import read_open_model_zoo
from penstock.vision.spec import Triple
from tests.models.inspect.made_models import (
    Array,
    asked,
    centres,
    constant_model,
    inspected,
    joined,
    numbers,
    scores,
    transposed,
)

# In the form of models/public/mobilenet-v2-pytorch of openvinotoolkit/open_model_zoo.
MODEL_YML = """description: >-
  A classifier.
task_type: classification
framework: pytorch
model_optimizer_args:
  - --framework=onnx
  - --input=data
  - --mean_values=data[123.675,116.28,103.53]
  - --scale_values=data[58.624,57.12,57.375]
  - --reverse_input_channels
  - --input_model=$conv_dir/mobilenet-v2.onnx
"""
ONNX_CHECK = """models:
  - name: mobilenet
    launchers:
      - framework: onnx_runtime
        adapter: classification
    datasets:
      - name: imagenet_1000_classes
        reader: pillow_imread
        # resized, then cut
        preprocessing:
          - type: resize
            size: 256
            aspect_ratio_scale: greater
          - type: crop
            size: 224

          - type: normalization
            std: 255
          - type: normalization
            mean: (0.485, 0.456, 0.406)
            std: (0.229, 0.224, 0.225)
        metrics:
          - type: accuracy
            top_k: 1
"""
IR_CHECK = ONNX_CHECK.replace("onnx_runtime", "dlsdk").replace("type: normalization", "type: other")
PADDED_CHECK = """models:
  - name: yolo
    launchers:
      - framework: onnx_runtime
        model: yolo.onnx
    datasets:
      - name: coco
        preprocessing:
          - type: bgr_to_rgb
          - type: resize
            dst_height: 320
            dst_width: 416
            aspect_ratio_scale: fit_to_window
          - type: padding
            pad_value: 128, 128, 128
            dst_height: 320
            dst_width: 416
          - type: normalization
            std: 255
"""


def api(**entries: str) -> dict[str, str]:
    """Keys as Model API writes them."""
    return {f"model_info {key}": value for key, value in entries.items()}


def plain_input(card: Mapping[str, str], pixel: Triple) -> Array:
    """The input of the network for one RGB pixel, by the card's documented arithmetic."""
    ordered = np.array(pixel if card["model-color-format"] == "0" else pixel[::-1])
    offsets = [float(one) for one in card.get("offsets", "0;0;0").split(";")]
    factors = [float(one) for one in card.get("channel-scale-factors", "1;1;1").split(";")]
    result: Array = float(card["net-scale-factor"]) * (ordered - offsets) * factors
    return result


def classifier(folder: Path, metadata: Mapping[str, str] | None = None, count: int = 1000) -> Path:
    return constant_model(
        folder / "m.onnx", {"prob": numbers(1, count, low=-3, high=9)}, image=(1, 3, 224, 224), metadata=metadata
    )


def test_the_conversions_arguments_are_the_preprocessing_of_the_onnx_file(tmp_path: Path) -> None:
    """The converted model takes BGR: one that reverses its channels was made of a file that takes RGB."""
    (tmp_path / "model.yml").write_text(MODEL_YML)
    found = inspected(classifier(tmp_path)).recognition
    expected = (np.array([200, 100, 50]) - [123.675, 116.28, 103.53]) / [58.624, 57.12, 57.375]
    assert plain_input(found.parameters, (200, 100, 50)) == pytest.approx(expected, abs=1e-5)
    assert any("model.yml (Open Model Zoo)" in sentence for sentence in found.evidence)
    (tmp_path / "model.yml").write_text(MODEL_YML.replace("  - --reverse_input_channels\n", ""))
    other = inspected(classifier(tmp_path)).recognition
    expected = (np.array([50, 100, 200]) - [123.675, 116.28, 103.53]) / [58.624, 57.12, 57.375]
    assert plain_input(other.parameters, (200, 100, 50)) == pytest.approx(expected, abs=1e-5)


def test_the_check_of_the_onnx_file_is_its_whole_preprocessing(tmp_path: Path) -> None:
    """Reader, resize, crop, and two normalisations in turn; model.yml is not needed, and flags replace its parts."""
    (tmp_path / "accuracy-check.yml").write_text(ONNX_CHECK + IR_CHECK.replace("models:\n", ""))
    card = inspected(classifier(tmp_path)).recognition.parameters
    expected = (np.array([200, 100, 50]) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert plain_input(card, (200, 100, 50)) == pytest.approx(expected, abs=1e-5)
    assert card["resize-shorter-side"] == "256"
    flags = inspected(classifier(tmp_path), Hints(resize="squash", color="bgr")).recognition.parameters
    assert ("resize-shorter-side" in flags, flags["model-color-format"]) == (False, "1")


def test_the_check_of_the_converted_model_gives_the_fit_and_model_yml_the_rest(tmp_path: Path) -> None:
    """The converted model has the normalisation in its graph; the ONNX file has not."""
    (tmp_path / "accuracy-check.yml").write_text(IR_CHECK.replace("size: 256", "size: 240"))
    (tmp_path / "model.yml").write_text(MODEL_YML)
    found = inspected(classifier(tmp_path)).recognition
    assert found.parameters["resize-shorter-side"] == "240"
    expected = (np.array([200, 100, 50]) - [123.675, 116.28, 103.53]) / [58.624, 57.12, 57.375]
    assert plain_input(found.parameters, (200, 100, 50)) == pytest.approx(expected, abs=1e-5)
    assert any("accuracy-check.yml and model.yml" in sentence for sentence in found.evidence)


@pytest.mark.parametrize(("kind", "expected"), [("", "letterbox"), ("            pad_type: right_bottom\n", "corner")])
def test_padding_and_size_of_the_check_are_read(tmp_path: Path, kind: str, expected: str) -> None:
    """Height and width, colour order, pad value; padding is centred by default."""
    (tmp_path / "accuracy-check.yml").write_text(PADDED_CHECK.replace("128, 128, 128\n", f"128, 128, 128\n{kind}"))
    read = read_open_model_zoo(tmp_path)
    assert read is not None
    hints = read[0]
    assert (hints.input_size, hints.color, hints.resize, hints.padding) == ((320, 416), "rgb", expected, 128.0)
    assert (hints.scale, hints.mean, hints.std) == (1.0, (0.0, 0.0, 0.0), (255.0, 255.0, 255.0))


def test_a_central_fraction_is_a_shorter_side(tmp_path: Path) -> None:
    """As the checks of TensorFlow's classifiers have it: a crop of 0.875, and then a resize to 224."""
    steps = (
        "          - type: crop\n            central_fraction: 0.875\n          - type: resize\n            size: 224\n"
    )
    begin, _, end = ONNX_CHECK.partition("          - type: resize\n")
    rest = end.partition("          - type: normalization\n")[2]
    text = begin + steps + "          - type: normalization\n" + rest
    (tmp_path / "accuracy-check.yml").write_text(text)
    assert inspected(classifier(tmp_path)).recognition.parameters["resize-shorter-side"] == "256"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.yml", "names: [a, b]\n"),
        ("model.yml", MODEL_YML.replace("58.624,57.12,57.375", "0,0,0")),
        ("model.yml", MODEL_YML.replace("123.675", "nan")),
        ("model.yml", MODEL_YML.replace("123.675", "1e999")),
        ("model.yml", MODEL_YML.replace("[123.675,116.28,103.53]", "imagenet")),
        ("accuracy-check.yml", "models:\n"),
        ("accuracy-check.yml", ONNX_CHECK.replace("std: 255", "std: 0")),
        ("accuracy-check.yml", ONNX_CHECK.replace("(0.485, 0.456, 0.406)", "imagenet")),
        ("accuracy-check.yml", "\0" * 99),
        ("accuracy-check.yml", "models:\n" + "  - name: a\n    launchers:\n" * 9000),
    ],
)
def test_malformed_files_of_the_zoo_are_as_if_absent(tmp_path: Path, name: str, text: str) -> None:
    """Their values are bounded, and nothing of them is needed."""
    (tmp_path / name).write_text(text)
    assert read_open_model_zoo(tmp_path) is None


def test_model_api_names_both_thresholds(tmp_path: Path) -> None:
    """Where the layout has its NMS here, iou_threshold is the card's; flags replace it."""
    rows = transposed(joined(centres(2100, 320), scores(2100, 2)))
    metadata = api(
        model_type="YOLOv8", labels="ripe_fruit leaf", confidence_threshold="0.35", iou_threshold="0.6",
        resize_type="fit_to_window_letterbox",
    )  # fmt: skip
    path = constant_model(tmp_path / "m.onnx", {"out": rows}, image=(1, 3, 320, 320), metadata=metadata)
    card = inspected(path).recognition.parameters
    assert (card["pre-cluster-threshold"], card["nms-iou-threshold"]) == ("0.35", "0.6")
    assert (card["padding-value"], float(card["net-scale-factor"])) == ("114", pytest.approx(1 / 255))
    assert inspected(path, Hints(iou=0.3)).recognition.parameters["nms-iou-threshold"] == "0.3"


@pytest.mark.parametrize("value", ["nan", "1.5", "-1", "x", ""])
def test_thresholds_of_model_api_out_of_range_are_as_if_absent(tmp_path: Path, value: str) -> None:
    """The defaults are used."""
    rows = transposed(joined(centres(2100, 320), scores(2100, 2)))
    metadata = api(model_type="YOLOv8", labels="a b", confidence_threshold=value, iou_threshold=value)
    path = constant_model(tmp_path / "m.onnx", {"out": rows}, image=(1, 3, 320, 320), metadata=metadata)
    card = inspected(path).recognition.parameters
    assert (card["pre-cluster-threshold"], card["nms-iou-threshold"], card["padding-value"]) == ("0.25", "0.45", "114")


def test_model_api_pads_with_black_unless_it_says_otherwise(tmp_path: Path) -> None:
    """Its models other than YOLO have pad_value 0 by default."""
    metadata = api(model_type="Classification", labels="a b", resize_type="fit_to_window")
    card = inspected(classifier(tmp_path, metadata, 2)).recognition.parameters
    assert (card["maintain-aspect-ratio"], card["padding-value"]) == ("1", "0")


def test_model_type_settles_a_classifier_and_a_segmentation(tmp_path: Path) -> None:
    """Ten numbers, or one number for each pixel, are ambiguous without it."""
    metadata = api(model_type="Classification", mean_values="0 0 0", scale_values="255 255 255")
    found = inspected(classifier(tmp_path, metadata, 10))
    assert (found.verdict, found.recognition.layout) == (Verdict.SERVABLE, "classification"), found.reason
    plane = {"out": numbers(1, 1, 64, 64, low=-4, high=4)}
    path = constant_model(
        tmp_path / "s.onnx", plane, image=(1, 3, 64, 64), metadata=api(model_type="Segmentation", scale_values="255")
    )
    found = inspected(path)
    assert (found.verdict, found.recognition.layout) == (Verdict.SERVABLE, "semantic"), found.reason
    without = constant_model(tmp_path / "t.onnx", plane, image=(1, 3, 64, 64), metadata=api(scale_values="255"))
    assert asked(inspected(without)) == ["--layout"]


@pytest.mark.parametrize(("multilabel", "parameter"), [("True", "apply-sigmoid"), ("False", "apply-softmax")])
def test_model_api_says_whether_classes_are_independent(tmp_path: Path, multilabel: str, parameter: str) -> None:
    """Logits of several labels have a sigmoid each."""
    metadata = api(model_type="Classification", labels="a b c", multilabel=multilabel, scale_values="255")
    card = inspected(classifier(tmp_path, metadata, 3)).recognition.parameters
    assert [name for name in ("apply-sigmoid", "apply-softmax") if card.get(name) == "1"] == [parameter]
