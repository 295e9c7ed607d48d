"""On a real card: NVDEC alone, and a few streams of the product, by the bench of video on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engines.triton.runtime import TritonUnavailable, default_environment, find_triton
from tests.support.stack import CHECKOUT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_bench_holds_four_streams_that_nvdec_decodes(tmp_path: Path) -> None:
    """NVDEC alone is faster than a camera; each camera's decoder is nvdec, and rows reach the engine."""
    environment = Path(os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT") or default_environment(Path(sys.prefix)))
    try:
        find_triton(environment=environment)
    except TritonUnavailable as error:
        pytest.skip(str(error))
    pytest.importorskip("torch", reason="needs torch: make gpu")
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings: make gpu")
    small = ("--cameras", "h264-720p", "--only", "nvdec,streams", "--rounds", "1", "--seconds", "2", "--mps", "off")
    few = ("--streams", "4", "--most", "4", "--programs", "2", "--instances", "1")
    command = [sys.executable, "-m", "loadtest.bench.gpu.video", *small, *few, "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--engine-environment", str(environment), "--nvdec-seconds", "1"],
        cwd=CHECKOUT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {
        part: json.loads((tmp_path / "out" / f"{part}-h264-720p-1.json").read_text()) for part in small[3].split(",")
    }
    assert found["nvdec"]["found"]["best"]["rate"] > 120
    tried = found["streams"]["found"]["tries"][-1]
    assert tried["decode_processes"]["nvdec"] == 2
    assert sum(tried["rows"].values()) > 0
