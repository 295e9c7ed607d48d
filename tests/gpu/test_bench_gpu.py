"""On a real card: a small chart by the GPU bench, through two Tritons with and without MPS."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engines.triton.runtime import TritonUnavailable, default_environment, find_triton
from tests.support.stack import CHECKOUT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MODES = {"none", "mps", "mps-unlimited", "batching", "mps+batching", "mps+shared"}


def test_bench_with_two_clients_measures_every_mode_and_mps_has_its_clients(tmp_path: Path) -> None:
    """Each mode answers both numbers of clients; the daemon has a client a model at least, and util is read."""
    environment = Path(os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT") or default_environment(Path(sys.prefix)))
    try:
        find_triton(environment=environment)
    except TritonUnavailable as error:
        pytest.skip(str(error))
    pytest.importorskip("torch", reason="needs torch: make gpu")
    out = tmp_path / "gpu.json"
    small = ("--only", "chart", "--clients", "1", "2", "--rounds", "1", "--seconds", "0.5", "--instances", "1")
    command = [sys.executable, "-m", "loadtest.bench.gpu", *small, "--json", str(out)]
    done = subprocess.run(
        [*command, "--engine-environment", str(environment)], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    rows = {(row["mode"], row["clients"]): row for row in report["results"] if row["kind"] == "chart"}
    assert rows.keys() == {(mode, count) for mode in MODES for count in (1, 2)}
    assert all(row["rate"]["median"] > 0 and "util" in row for row in rows.values())
    assert report["facts"]["chart, MPS clients"] >= 5
