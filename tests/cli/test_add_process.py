"""`penstock models add` as the gateway runs it: what it says in JSON, and its limits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import models as models_command
from tests.support.stack import CHECKOUT

MODELS = CHECKOUT.parent / "shared" / "models"
MEMORY_BYTES, CPU_S, FILE_BYTES = 4 << 30, 600, 64 << 20
needs_models = pytest.mark.skipif(not MODELS.is_dir(), reason="shared/models is not here")


def added(
    file: Path, home: Path, *flags: str, parent: int = 0, file_bytes: int = FILE_BYTES, verb: str = "add"
) -> subprocess.CompletedProcess[str]:
    """The process, ended."""
    limits = (parent or os.getpid(), MEMORY_BYTES, CPU_S, file_bytes)
    arguments = (*map(str, limits), verb, str(file), "--json", "--no-load", "--home", str(home), *flags)
    command = [sys.executable, "-P", "-m", "penstock.cli.add_process", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_file_that_is_no_model_is_one_object_in_json(tmp_path: Path) -> None:
    """With the name and the sentence; the same sentence is on standard error."""
    (tmp_path / "noise.onnx").write_bytes(bytes(range(256)))
    result = CliRunner().invoke(
        models_command.app, ["add", str(tmp_path / "noise.onnx"), "--json", "--no-load", "--home", str(tmp_path)]
    )
    said = json.loads(result.stdout)
    assert (result.exit_code, said["name"], said["questions"], said["is_disk_full"]) == (1, "noise", [], False)
    assert "not an ONNX model" in said["error"]
    assert said["error"] in result.stderr


@needs_models
def test_process_adds_a_file_and_says_where_it_is_from(tmp_path: Path) -> None:
    """The report is the only output; MODEL.md has the origin instead of the path."""
    done = added(MODELS / "ultraface_rfb320.onnx", tmp_path, "--origin=sent by ops", "--name=faces")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["layout"] == "ultraface"
    page = (tmp_path / "models" / "faces" / "MODEL.md").read_text()
    assert "| origin | sent by ops |" in page
    assert str(MODELS) not in page


@needs_models
def test_process_writes_no_file_over_its_limit(tmp_path: Path) -> None:
    """A sentence, and nothing is left in the repository or beside it."""
    done = added(MODELS / "ultraface_rfb320.onnx", tmp_path, "--name=faces", file_bytes=1 << 20)
    assert done.returncode == 1
    assert "File too large" in json.loads(done.stdout)["error"]
    assert not list((tmp_path / "models").iterdir())
    assert not list((tmp_path / "staging").iterdir())


def test_process_of_a_gateway_that_is_gone_does_nothing(tmp_path: Path) -> None:
    """Its parent is another process than the one that it was started for."""
    done = added(tmp_path / "missing.onnx", tmp_path, parent=1)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
