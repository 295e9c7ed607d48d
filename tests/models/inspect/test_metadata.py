"""Metadata of exporters: read as literals, bounded, and ignored where it is malformed."""

from pathlib import Path

import numpy as np
import pytest

from penstock.models.inspect.inspection import Verdict
from penstock.models.inspect.metadata import FileMetadata, metadata_of
from tests.models.inspect.made_models import constant_model, inspected, numbers


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{0: 'a', 10: 'k', 1: 'b', 2: 'c'}", ("a", "b", "c", "3", "4", "5", "6", "7", "8", "9", "k")),
        ("['a', 'b']", ("a", "b")),
        ("{'0': 'a', '1': 'b'}", ("a", "b")),
        ("{0: 'left; right', 1: 'two\\nlines'}", ("left, right", "two lines")),
        ("{0: 1, 1: 2.5}", ("1", "2.5")),
    ],
)
def test_names_are_a_literal_in_any_order(text: str, names: tuple[str, ...]) -> None:
    """Ultralytics' keys are not always in order; a label has no semicolon or line break, as the card cannot hold it."""
    assert metadata_of({"names": text}).names == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "person, car",
        "__import__('os').getcwd()",
        "[" * 900 + "]" * 900,
        "{1e3: 'a'}",
        "{-1: 'a'}",
        "{99999: 'a'}",
        "{0: ['a']}",
        "{0: 'a'" + ", 1: 'b'" * 60_000 + "}",
    ],
)
def test_malformed_names_are_as_if_absent(text: str) -> None:
    """Nothing is evaluated, and nothing is raised."""
    assert metadata_of({"names": text}) == FileMetadata()


@pytest.mark.parametrize("imgsz", ["[640]", "640.5", "['a', 'b']", "[0, 640]", "[True, 640]", "[10**9, 10**9]"])
def test_a_malformed_size_is_as_if_absent(imgsz: str) -> None:
    """Other metadata of the file is still read."""
    found = metadata_of({"names": "['a']", "imgsz": imgsz, "kpt_shape": imgsz})
    assert (found.imgsz, found.keypoint_shape, found.names) == (None, None, ("a",))


def test_characters_keep_their_order_and_first_line() -> None:
    """PP-OCR's first character can be an apostrophe."""
    assert metadata_of({"character": "'\na\n \n中"}).characters == ("'", "a", " ", "中")


def test_paddles_classes_are_labels(tmp_path: Path) -> None:
    """`character` of a classifier has its classes, one a line."""
    path = constant_model(
        tmp_path / "m.onnx",
        {"fetch_name_0": np.full((1, 4), 0.25, np.float32)},
        image=("N", 3, 224, 224),
        metadata={"character": "0\n90\n180\n270"},
    )
    found = inspected(path)
    assert (found.verdict, found.recognition.labels) == (Verdict.SERVABLE, ("0", "90", "180", "270"))


def test_class_names_and_standardization_are_read(tmp_path: Path) -> None:
    """As PUTvision/qgis-plugin-deepness documents them: JSON in class_names, standardization_mean and _std."""
    metadata = {
        "model_type": '"Segmentor"',
        "class_names": '{"0": "background", "1": "field"}',
        "standardization_mean": "[0.485, 0.456, 0.406]",
        "standardization_std": "[0.229, 0.224, 0.225]",
    }
    path = constant_model(
        tmp_path / "m.onnx", {"out": numbers(1, 2, 64, 64, low=-3)}, image=(1, 3, 256, 256), metadata=metadata
    )
    found = inspected(path)
    assert (found.verdict, found.recognition.layout) == (Verdict.SERVABLE, "semantic"), found.reason
    assert found.recognition.labels == ("background", "field")
    assert found.recognition.parameters["offsets"] == "123.675;116.28;103.53"


def test_standard_deviation_of_0_in_the_metadata_is_ignored() -> None:
    """Pixels cannot be divided by it."""
    metadata = {"class_names": '{"0": "a", "1": "b"}', "standardization_std": "[0.229, 0, 0.225]"}
    assert metadata_of(metadata).hints.std == ()
