"""inspect_file: one bounded child process a file, and one sentence for a bad one."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from penstock.models.inspect.facts import UnreadableModel
from penstock.models.inspect.inspection import Hints, Limits, Verdict, inspect_file
from tests.models.inspect.made_models import constant_model, inspected, numbers, ultralytics
from tests.support import made_networks


def test_a_file_of_ultralytics_is_recognised_by_its_metadata(tmp_path: Path) -> None:
    """Task, names and size of Ultralytics' metadata make the card, with no flag."""
    metadata = {"task": "detect", "names": "{1: 'dog', 0: 'cat; kitten'}", "imgsz": "[320, 256]", "stride": "32"}
    rows = np.random.default_rng(0).uniform(0.01, 0.4, (1, 6, 1680)).astype(np.float32)
    rows[0, :2] *= 600
    rows[0, 2:4] *= 40
    path = constant_model(
        tmp_path / "best.onnx", {"output0": rows}, image=("batch", 3, "height", "width"), metadata=metadata
    )
    found = inspect_file(path)
    assert (found.verdict, found.recognition.layout) == (Verdict.SERVABLE, "yolov8")
    assert found.recognition.input_size == (320, 256)
    assert found.recognition.labels == ("cat, kitten", "dog")
    assert found.recognition.parameters["padding-value"] == "114"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"not a model", "text, not an ONNX model"),
        (b'{"error": "Not found"}\r\n', "text, not an ONNX model"),
        (b"\x80\x04\x95\0", "a Python pickle"),
        (b"\x1f\x8b\x08\0", "unpack it"),
        (b"\x08\x08", "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        (b"PK\x03\x04archive/data.pkl", "not a PyTorch archive, or is damaged"),
        (b"\x20\0\0\0TFL3\0", "TensorFlow Lite"),
        (b"ftrt\0\0", "TensorRT engine"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\xef\xbb\xbf\n  <!doctype html>\n<html lang='en'>", "web page"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG picture, not a model"),
        (b"\x89PNG\r\n", "a PNG picture, not a model"),
        (b'\x13\0\0\0\0\0\0\0{ "__metadata__":{} }', "safetensors"),
        (b"\x89HDF\r\n", "a Keras file"),
        (b"<?xml version='1.0'?><net/>", "OpenVINO"),
        (b"<net name='m' version='11'>", "OpenVINO"),
        (b"GGUF\x03\0", "language model"),
    ],
)
def test_a_file_that_is_no_model_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    """The reason names the file and what is wrong with it."""
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(UnreadableModel, match=sentence):
        inspect_file(path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("best.engine", "a TensorRT engine: give the ONNX file"), ("best.plan", "TensorRT"), ("model.bin", "weights")],
)
def test_a_format_without_a_signature_is_named_by_its_suffix(tmp_path: Path, name: str, sentence: str) -> None:
    """Ultralytics writes its metadata before the bytes of a TensorRT engine."""
    path = tmp_path / name
    path.write_bytes(b'\x17\x00\x00\x00{"description": "Ultralytics"}')
    with pytest.raises(UnreadableModel, match=sentence):
        inspect_file(path)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    """The size is checked before anything is parsed."""
    path = constant_model(tmp_path / "large.onnx", {"output": np.zeros((1, 5), np.float32)})
    with pytest.raises(UnreadableModel, match=r"limit 10"):
        inspect_file(path, limits=Limits(file_bytes=10))


def test_yolox_is_recognised_without_metadata(shared_dir: Path) -> None:
    """The real YOLOX-Nano, by its rows and columns."""
    found = inspect_file(shared_dir / "models" / "yolox_nano.onnx")
    assert found.recognition.layout == "yolox"
    assert found.recognition.parameters["model-color-format"] == "1"


IMAGENET_NORM = (
    "ImageNet's mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225 of 0 to 1, which the file does not state; "
    "--mean, --std and --scale change it"
)
IMAGENET_LABELS = "ImageNet's labels, as the file has no names for its 1000 classes; --labels changes them"
TEN = tuple(f"class {number}" for number in range(10))


@pytest.mark.parametrize(
    ("count", "hints", "assumed"),
    [
        (1000, Hints(), (IMAGENET_NORM, IMAGENET_LABELS)),
        (1000, Hints(labels=TEN * 100), (IMAGENET_NORM,)),
        (10, Hints(labels=TEN, color="bgr"), (IMAGENET_NORM,)),
        (10, Hints(labels=TEN, mean=(0.5,), std=(0.5,)), ()),
        (10, Hints(labels=TEN, scale=1.0), ()),
        (10, Hints(labels=TEN, parameters={"net-scale-factor": "1"}), ()),
    ],
)
def test_what_is_assumed_of_a_classifier_is_listed(
    tmp_path: Path, count: int, hints: Hints, assumed: tuple[str, ...]
) -> None:
    """The file states no mean, deviation or labels: the usual ones are named, with the flags that change them."""
    path = constant_model(tmp_path / "model.onnx", {"out": numbers(1, count)}, image=(1, 3, 224, 224))
    found = inspected(path, hints)
    assert (found.verdict, found.recognition.assumptions) == (Verdict.SERVABLE, assumed)


def test_metadata_leaves_nothing_to_assume(tmp_path: Path) -> None:
    """Ultralytics' classifiers have names, and their scale is known."""
    metadata = ultralytics("classify", TEN, (224, 224))
    path = constant_model(tmp_path / "model.onnx", {"out": numbers(1, 10)}, image=(1, 3, 224, 224), metadata=metadata)
    assert inspected(path).recognition.assumptions == ()


def test_uint8_pixels_have_no_mean_to_assume(tmp_path: Path) -> None:
    """The graph scales them."""
    path = constant_model(
        tmp_path / "m.onnx", {"out": numbers(1, 1000)}, image=(1, 3, 224, 224), image_type=TensorProto.UINT8
    )
    assert inspected(path).recognition.assumptions == (IMAGENET_LABELS,)


@pytest.mark.parametrize("shape", ["17;3", ""])
def test_skeleton_that_is_given_is_in_the_card_or_a_warning(tmp_path: Path, shape: str) -> None:
    """Also where --parameter says that there are keypoints; without keypoints it is not dropped silently."""
    width = 57 if shape else 6
    rows = np.concatenate([np.sort(numbers(1, 300, 4), axis=-1) * 640, numbers(1, 300, width - 4)], axis=-1)
    rows[..., 5] = 0
    path = constant_model(tmp_path / "pose.onnx", {"output0": rows.astype(np.float32)}, image=(1, 3, 640, 640))
    layout = "yolo-end2end-pose" if shape else "yolo-end2end"
    hints = Hints(layout=layout, skeleton=((0, 1), (1, 2)), parameters={"keypoint-shape": shape} if shape else {})
    found = inspect_file(path, hints).recognition
    assert found.parameters.get("skeleton", "") == ("0-1;1-2" if shape else "")
    assert any("no keypoints" in warning for warning in found.warnings) is not bool(shape)


def test_reason_names_the_flag_of_a_question_without_choices(tmp_path: Path) -> None:
    """The sentence ends with the flag, not with a space where values would be."""
    found = inspect_file(made_networks.yolox(tmp_path / "yolox.onnx"))
    assert found.reason.endswith("this layout does not decode them; use --layout")
