"""`penstock load run` with a shipped scenario as it is, against the real stack."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_load.measure.run_folder import read_run_folder
from tests.support.stack import CHECKOUT, RunningStack

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("stack"), pytest.mark.timeout(600)]


def test_image_steady_finds_the_capacity_and_climbs_the_ladder(stack: RunningStack, tmp_path: Path) -> None:
    """README's first load run without a rate of its own: every phase is asked, judged or not; exit code 0."""
    where = ["--target", stack.http_url, "--grpc", stack.grpc_address, "--metrics", stack.metrics_url]
    words = ["load", "run", "image-steady", *where, "--slo-p99-ms", "8000", "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words],
        cwd=CHECKOUT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    phases = {phase.phase: phase.all.ok for phase in read_run_folder(tmp_path / "out").run.phases}
    assert set(phases) >= {"capacity", "ladder", "steady"}
    assert all(phases.values())
