"""The metadata that `models add` writes for Ultralytics' own Triton client."""

import ast
from pathlib import Path

import pytest

from penstock.engines.config_pbtxt import read_config
from penstock.models.add import AddOptions, add_model
from penstock.models.inspect.inspection import Hints
from penstock.models.inspect.metadata import ultralytics_literal
from tests.support.made_networks import ultralytics

FULL = {
    "task": "pose",
    "stride": "32",
    "batch": "4",
    "imgsz": "[96, 64]",
    "names": "{1: 'b', 0: 'a'}",
    "kpt_shape": "[17, 3]",
    "args": "{'nms': True, 'dynamic': True}",
    "description": "left out",
}


def test_served_labels_and_size_replace_those_of_the_file() -> None:
    """The client sends pictures of the size that the config has, and names classes as /image does."""
    assert ast.literal_eval(ultralytics_literal(FULL, ("x", "y"), (640, 480))) == {
        "task": "pose",
        "stride": 32,
        "batch": 4,
        "imgsz": [640, 480],
        "names": {0: "x", 1: "y"},
        "end2end": False,
        "args": {"dynamic": False, "nms": True},
        "kpt_shape": [17, 3],
    }
    free = ast.literal_eval(ultralytics_literal(FULL, (), None))
    assert (free["imgsz"], free["names"], free["args"]["dynamic"]) == ([96, 64], {0: "a", 1: "b"}, True)


@pytest.mark.parametrize("key", ["task", "stride", "batch", "names"])
@pytest.mark.parametrize("value", ["", "__import__('os')", "[", "None"])
def test_incomplete_metadata_is_not_written(key: str, value: str) -> None:
    """The client fails without one of its keys, and works without any metadata."""
    assert ultralytics_literal(FULL | {key: value}, (), (64, 64)) == "" or (key == "task" and value)


def test_added_model_has_it_in_its_config(tmp_path: Path) -> None:
    """Only a file with Ultralytics' metadata."""
    source = ultralytics(tmp_path / "m.onnx")
    added = add_model(source, "m", AddOptions(Hints(scale=1 / 255, labels=("a", "b", "c"))), home=tmp_path)
    found = ast.literal_eval(read_config(added.folder / "config.pbtxt").parameters["metadata"])
    assert (found["names"], found["imgsz"]) == ({0: "a", 1: "b", 2: "c"}, [64, 64])
