"""`penstock models check` against real engines: Triton behind the gateway, and ONNX Runtime in the command itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

from penstock.cli import models as models_command
from tests.support.pulled_models import pull_model
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")


def check(home: Path, *words: str, repository: Path | None = None) -> tuple[int, dict[str, Any]]:
    """The exit code of `penstock models check --json`, and its rows by name."""
    environ = {"PENSTOCK_HOME": str(home), "PENSTOCK_HTTP_PORT": "9"}  # an unused port
    if repository is not None:
        environ["PENSTOCK_MODEL_REPOSITORY"] = str(repository)
    done = CliRunner().invoke(models_command.app, ["check", "--json", *words], env=environ)
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, {row["name"]: row for row in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, shared_dir: Path) -> Path:
    """A home into which fastestdet was pulled."""
    home = tmp_path_factory.mktemp("home")
    pull_model(home)
    return home


@pytest.fixture
def pulled(tmp_path: Path, source: Path) -> Path:
    """A copy of that home, to be changed."""
    return Path(shutil.copytree(source, tmp_path / "home"))


def test_check_of_every_model_of_a_running_stack_tells_right_from_broken(stack: RunningStack, shared_dir: Path) -> None:
    """Triton's answers to what is shipped and pulled are the recorded ones; unloadable models are reported."""
    code, rows = check(stack.home, "--url", stack.http_url)
    assert code == 1
    assert rows["broken"]["verdict"] == "cannot run"
    assert "broken on purpose" in rows["broken"]["reasons"][0]
    assert rows["identity_bytes"]["verdict"] == "not judged"
    for name, references in {
        "people": ["golden.jpg"],
        "identity_fp32": ["golden.json", "ONNX Runtime"],
        "fastestdet": ["golden.jpg", "golden.json", "ONNX Runtime"],
    }.items():
        row = rows[name]
        assert (row["verdict"], row["ran"], row["compared_with"]) == ("ok", "gateway", references), row


def test_check_of_a_tensor_model_of_the_stack_passes_its_answer_through(stack: RunningStack) -> None:
    """A shape that is given is sent; an ONNX file says what is right, of a python model's answer nothing does."""
    code, rows = check(stack.home, "identity_fp32", "identity_bytes", "--shape", "x:2,5", "--url", stack.http_url)
    assert code == 0
    assert {row["ran"] for row in rows.values()} == {"gateway"}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "identity_fp32": "ok",
        "identity_bytes": "not judged",
    }


def test_check_without_a_gateway_runs_fastestdet_in_the_command(pulled: Path) -> None:
    """The embedded engine gives the recorded answers, tensors and picture; people needs Triton and is not judged."""
    code, rows = check(pulled)
    assert code == 0
    row = rows["fastestdet"]
    assert (row["verdict"], row["ran"]) == ("ok", "in-process"), row
    assert row["compared_with"] == ["golden.jpg", "golden.json", "ONNX Runtime"]
    assert rows["people"]["verdict"] == "not judged"


def test_check_catches_other_weights_and_a_damaged_file(pulled: Path) -> None:
    """Weights that differ by a twentieth are seen in hash and numbers; a cut file in its hash and its failure."""
    file = pulled / "models" / "fastestdet" / "1" / "model.onnx"
    model = onnx.load(file)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 4:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.05, tensor.name))
    onnx.save(model, file)
    code, rows = check(pulled, "fastestdet")
    row = rows["fastestdet"]
    assert (code, row["verdict"]) == (1, "differs")
    assert "the catalogue says 31cb14c017fc…" in row["reasons"][0]
    assert any("(by golden.json)" in reason for reason in row["reasons"])
    file.write_bytes(file.read_bytes()[:500_000])
    code, rows = check(pulled, "fastestdet")
    assert (code, rows["fastestdet"]["verdict"]) == (1, "cannot run")
    assert "SHA-256" in rows["fastestdet"]["reasons"][0]


def test_check_catches_a_config_that_names_the_wrong_output(pulled: Path) -> None:
    """As the engine says it: the config's name, and the names that the file has."""
    config = pulled / "models" / "fastestdet" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "758"', 'name: "759"'))
    code, rows = check(pulled, "fastestdet")
    assert (code, rows["fastestdet"]["verdict"]) == (1, "cannot run")
    assert "names output '759', the ONNX file's outputs are '758'" in rows["fastestdet"]["reasons"][0]


def test_check_catches_a_card_that_scales_pixels_wrongly(pulled: Path) -> None:
    """The tensors are right and the boxes are not: only the picture, sent the whole way, tells."""
    config = pulled / "models" / "fastestdet" / "config.pbtxt"
    scale = 'key: "net-scale-factor" value { string_value: "0.00392156862745098" }'
    config.write_text(config.read_text().replace(scale, scale.replace("0.0039", "0.0005")))
    code, rows = check(pulled, "fastestdet")
    assert (code, rows["fastestdet"]["verdict"]) == (1, "differs")
    assert len(rows["fastestdet"]["reasons"]) == 1
    assert rows["fastestdet"]["reasons"][0].startswith("golden.jpg: class 0 at ")


def test_record_of_a_users_model_holds_for_the_engine_too(stack: RunningStack, pulled: Path, tmp_path: Path) -> None:
    """Recorded without any gateway, by plain ONNX Runtime; Triton then answers the same."""
    folder = tmp_path / "mine" / "fastestdet"
    shutil.copytree(pulled / "models" / "fastestdet", folder)
    (folder / "golden.json").unlink()
    code, rows = check(tmp_path, "fastestdet", "--record", repository=folder.parent)
    assert (code, rows["fastestdet"]["verdict"]) == (0, "ok")
    code, rows = check(tmp_path, "fastestdet", "--url", stack.http_url, repository=folder.parent)
    assert (code, rows["fastestdet"]["verdict"], rows["fastestdet"]["ran"]) == (0, "ok", "gateway")
