"""Files beside a model: labels in many forms, and Roboflow's descriptions."""

import json
from pathlib import Path

import pytest

from penstock.models.inspect.inspection import Hints, Verdict
from penstock.models.inspect.sidecar_files import read_sidecar_files
from tests.models.inspect.made_models import (
    asked,
    centres,
    constant_model,
    corners,
    inspected,
    joined,
    numbers,
    scores,
    transposed,
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.txt", "cat\ndog\n"),
        ("classes.txt", "['cat', 'dog']"),
        ("class_names.txt", '{"0": "cat", "1": "dog"}'),
        ("best.names", "cat\ndog"),
        ("best.yaml", "path: data\nnames:\n  0: cat\n  1: dog\nnc: 2\n"),
        ("best.yml", "nc: 2\nnames: ['cat', 'dog']\n"),
        ("best.yaml", "names:\n- cat\n- dog\n"),
        ("best.yaml", "names: [cat, dog]\n"),
    ],
)
def test_labels_have_many_forms(tmp_path: Path, name: str, text: str) -> None:
    """One a line, a list, a dictionary, or a data set's YAML."""
    (tmp_path / name).write_text(text)
    found = read_sidecar_files(tmp_path / "best.onnx")
    assert (found.labels, found.labels_origin) == (("cat", "dog"), name)


def test_list_of_characters_can_begin_with_a_bracket(tmp_path: Path) -> None:
    """The characters of a text recogniser, one per line, are not a list in Python."""
    (tmp_path / "labels.txt").write_text("[\n]\na\n")
    assert read_sidecar_files(tmp_path / "best.onnx").labels == ("[", "]", "a")


def test_roboflows_environment_says_how_pictures_are_fitted(tmp_path: Path) -> None:
    """PREPROCESSING of environment.json, and class_names.txt, as roboflow/inference reads them."""
    preprocessing = json.dumps({"resize": {"enabled": True, "width": 640, "format": "Fit (white edges) in"}})
    (tmp_path / "environment.json").write_text(json.dumps({"PREPROCESSING": preprocessing}))
    (tmp_path / "class_names.txt").write_text("bolt\nnut\n")
    rows = transposed(joined(centres(2100, 320), scores(2100, 2)))
    found = inspected(constant_model(tmp_path / "weights.onnx", {"output0": rows}, image=(1, 3, 320, 320)))
    assert (found.verdict, found.recognition.labels) == (Verdict.SERVABLE, ("bolt", "nut"))
    assert found.recognition.parameters["padding-value"] == "255"
    assert any("environment.json" in sentence for sentence in found.recognition.evidence)


def test_roboflows_inference_config_settles_the_preprocessing(tmp_path: Path) -> None:
    """network_input of inference_config.json: size, colours, scale, normalization, resize."""
    network = {
        "training_input_size": {"height": 320, "width": 320},
        "color_mode": "bgr",
        "resize_mode": "letterbox",
        "padding_value": 0,
        "scaling_factor": 255,
        "normalization": [[0.5, 0.5, 0.5], [0.25, 0.25, 0.25]],
    }
    (tmp_path / "inference_config.json").write_text(json.dumps({"network_input": network}))
    outputs = {"dets": joined(corners(50, 320), scores(50, 1)), "labels": numbers(1, 50).astype("int64")}
    path = constant_model(tmp_path / "m.onnx", outputs, image=(1, 3, "h", "w"))
    card = inspected(path).recognition.parameters
    assert (card["infer-dims"], card["model-color-format"], card["padding-value"]) == ("3;320;320", "1", "0")
    assert (card["offsets"], card["channel-scale-factors"]) == ("127.5;127.5;127.5", "4;4;4")
    assert asked(inspected(path)) == []


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[]",
        '{"network_input": 3}',
        '{"network_input": {"scaling_factor": 1e999}}',
        '{"network_input": {"scaling_factor": 1e-320}}',
        '{"network_input": {"scaling_factor": 1%s}}' % ("0" * 400),
    ],
)
def test_a_malformed_file_beside_is_as_if_absent(tmp_path: Path, text: str) -> None:
    """Its values are bounded, and nothing of it is needed."""
    (tmp_path / "inference_config.json").write_text(text)
    hints = read_sidecar_files(tmp_path / "best.onnx").hints
    assert hints in (Hints(), Hints(scale=1.0))


def test_a_yaml_with_a_digit_that_is_no_number_is_as_if_absent(tmp_path: Path) -> None:
    """A superscript is a digit to Python, and not a number."""
    (tmp_path / "best.yaml").write_text("names:\n  \u00b2: cat\n")
    assert read_sidecar_files(tmp_path / "best.onnx").labels == ()


def test_labels_of_another_model_are_not_used(tmp_path: Path) -> None:
    """A file with another number of names is named and left out."""
    (tmp_path / "labels.txt").write_text("one\ntwo\nthree\n")
    rows = transposed(joined(centres(2100, 320), scores(2100, 80)))
    found = inspected(constant_model(tmp_path / "m.onnx", {"output0": rows}, image=(1, 3, 320, 320)))
    assert (found.verdict, len(found.recognition.labels)) == (Verdict.SERVABLE, 80)
    assert any("labels.txt is not used: it has 3 names" in sentence for sentence in found.recognition.warnings)
