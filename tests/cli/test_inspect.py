"""`penstock models inspect`: the page, the JSON, and the exit code."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli import models as models_command
from penstock.cli.add import sources_of
from penstock.cli.model_flags import ModelFlags
from tests.models.inspect.made_models import centres, constant_model, joined, scores, transposed, ultralytics


def inspect(*words: str) -> Result:
    return CliRunner().invoke(models_command.app, ["inspect", *words])


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    """A file of Ultralytics' exporter."""
    rows = transposed(joined(centres(2100, 320), scores(2100, 2)))
    metadata = ultralytics("detect", ("cat", "dog"), (320, 320))
    return constant_model(tmp_path / "best.onnx", {"output0": rows}, image=(1, 3, 320, 320), metadata=metadata)


def test_the_page_shows_evidence_card_and_the_next_command(detector: Path) -> None:
    """Exit code 0 for a servable file."""
    done = inspect(str(detector))
    assert done.exit_code == 0, done.output
    for part in ("layout    yolov8", "padding-value: 114", "cat; dog", "task 'detect'", f"models add {detector}"):
        assert part in done.stdout


def test_an_open_question_names_its_flag(tmp_path: Path) -> None:
    """Exit code 1, and the flag with its choices; with the flag it is 0."""
    path = constant_model(tmp_path / "x.onnx", {"out": np.zeros((1, 10), np.float32)}, image=(1, 3, 32, 32))
    done = inspect(str(path))
    assert done.exit_code == 1
    assert "use --layout classification or embedding" in done.stdout
    assert inspect(str(path), "--layout", "classification").exit_code == 0


def test_what_is_assumed_is_a_line_of_its_own(tmp_path: Path) -> None:
    """A classifier without metadata: ImageNet's mean and labels, on the page and in the JSON."""
    path = constant_model(tmp_path / "x.onnx", {"out": np.zeros((1, 1000), np.float32)}, image=(1, 3, 32, 32))
    page = inspect(str(path)).stdout
    assert "assumed   ImageNet's mean 0.485, 0.456, 0.406" in page
    assert "ImageNet's labels" in page
    assert len(json.loads(inspect(str(path), "--json").stdout)["recognition"]["assumptions"]) == 2


def test_the_json_is_the_whole_inspection(detector: Path) -> None:
    """One object: facts, recognition, trial, verdict."""
    found = json.loads(inspect(str(detector), "--json").stdout)
    assert found["verdict"] == "servable"
    assert found["recognition"]["parameters"]["labels"] == "cat;dog"
    assert found["facts"]["metadata"]["task"] == "detect"
    assert found["trial"]["is_decoded"] is True


def test_a_bad_file_is_a_sentence(tmp_path: Path) -> None:
    """Exit code 1, in the JSON, too."""
    path = tmp_path / "bad.onnx"
    path.write_bytes(b"no model")
    done = inspect(str(path))
    assert (done.exit_code, "not an ONNX model" in done.output) == (1, True)
    assert "not an ONNX model" in json.loads(inspect(str(path), "--json").stdout)["problem"]


@pytest.mark.parametrize("name", ["absent.onnx", "n" * 300])
def test_missing_file_is_wrong_usage_as_for_models_add(tmp_path: Path, name: str) -> None:
    """`models inspect` and `models add` both end with 2, with --json, too."""
    path = str(tmp_path / name)
    assert inspect(path).exit_code == 2
    assert inspect(path, "--json").exit_code == 2
    with pytest.raises(typer.Exit) as ended:
        sources_of([tmp_path / name], "")
    assert ended.value.exit_code == 2


def test_a_deepstream_file_is_taken(detector: Path, tmp_path: Path) -> None:
    """--deepstream FILE says what the card has; a bad one is named."""
    config = tmp_path / "config_infer_primary.txt"
    config.write_text("[property]\nmodel-color-format=1\n[class-attrs-all]\npre-cluster-threshold=0.4\n")
    card = json.loads(inspect(str(detector), "--json", "--deepstream", str(config)).stdout)["recognition"]["parameters"]
    assert (card["model-color-format"], card["pre-cluster-threshold"]) == ("1", "0.4")
    config.write_text("nothing")
    done = inspect(str(detector), "--deepstream", str(config))
    assert (done.exit_code, "--deepstream" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [("names.txt", "cat\ndog\n"), ("names.json", '["cat", "dog"]'), ("data.yaml", "nc: 2\nnames:\n- cat\n- dog\n")],
)
def test_labels_flag_takes_every_form_of_labels_file(tmp_path: Path, name: str, text: str) -> None:
    """One label per line, a JSON list, or the names of a data set's YAML."""
    (tmp_path / name).write_text(text)
    hints = ModelFlags(labels=str(tmp_path / name)).hints()
    assert (hints.labels, hints.labels_origin) == (("cat", "dog"), str(tmp_path / name))


def test_labels_flag_without_labels_in_the_file_is_refused(tmp_path: Path) -> None:
    """The sentence names the file and the forms."""
    (tmp_path / "data.yaml").write_text("nc: 2\n")
    done = inspect(str(tmp_path / "m.onnx"), "--labels", str(tmp_path / "data.yaml"))
    assert (done.exit_code, "no labels in" in done.output) == (2, True)
