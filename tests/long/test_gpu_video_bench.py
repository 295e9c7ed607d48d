"""The bench of video on a GPU whole, without one: the CPU decodes, the embedded engine answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stack import CHECKOUT

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]
MODULE = "loadtest.bench.gpu.video"
SMALL = ("--no-gpu", "--cameras", "h264-720p", "--rounds", "1", "--programs", "2", "--streams", "2", "--most", "2")


def run_bench(arguments: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """In a temporary folder of its own, so that no other stack of this user is met."""
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=CHECKOUT, capture_output=True, text=True,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
    )  # fmt: skip


def test_miniature_is_measured_reported_and_not_done_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two streams by the CPU have a piece; the page has their number; a second run has nothing left to do."""
    folder = tmp_path_factory.mktemp("v")
    out, places = folder / "out", ("--out", str(folder / "out"), "--work", str(folder / "work"))
    command = (MODULE, *SMALL, *places, "--seconds", "2", "--settle", "1")
    done = run_bench(command, folder)
    assert done.returncode == 0, done.stderr
    tried = json.loads((out / "streams-h264-720p-1.json").read_text())["found"]["tries"][0]
    assert (tried["streams"], tried["decode_processes"]["cpu"], tried["restarts"]) == (2, 2, 0)
    assert tried["rate"] > 0
    assert tried["cores"]["decode process"] > 0
    again = run_bench(command, folder)
    assert (again.returncode, "0 pieces to do" in again.stderr) == (0, True)
    assert run_bench((f"{MODULE}.report", str(out)), folder).returncode == 0
    assert "720p30 H.264, round 1 |" in (out / "gpu-video.md").read_text()
