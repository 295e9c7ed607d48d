"""On a real GPU: `models add` tries CPU and GPU, chooses, and the model is served as chosen.

Needs onnxruntime-gpu (make gpu). Models of ../shared/models; a test whose model is absent skips.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from penstock.engines.config_pbtxt import read_proto
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.ort_serving.placement import Precision
from penstock.models.placement.choice import Device, ModelPlacement
from penstock.models.placement.trial import try_placements
from tests.test_architecture import CHECKOUT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu (make gpu)"
    ),
]
YOLOX = CHECKOUT.parent / "shared" / "models" / "yolox_nano.onnx"
STREET = CHECKOUT / "server" / "penstock" / "models" / "shipped" / "street"
FP32, FP16 = ModelPlacement(Device.GPU), ModelPlacement(Device.GPU, Precision.FP16)


def test_trial_on_the_gpu_agrees_with_the_cpu() -> None:
    """The shipped detector finds the same boxes on the GPU in FP32 and in FP16, with CUDA graphs and a rate."""
    cpu, *others = try_placements(STREET, [FP32, FP16], pictures=[], rows=1)
    assert not cpu.problem
    for one in others:
        assert not one.problem
        assert not one.disagreement
        assert one.is_compared
        assert one.graphs
        assert one.rate > 0  # which is faster depends on the cores: the bench compares them


def test_added_model_is_placed_on_the_gpu_served_there_and_passes_the_check(tmp_path: Path) -> None:
    """The command chooses the GPU, writes it, and the embedded engine and `models check` run it so."""
    if not YOLOX.is_file():
        pytest.skip(f"needs {YOLOX}")
    environment = os.environ | {"PENSTOCK_HOME": str(tmp_path)}
    program = [sys.executable, "-m", "penstock.cli.main", "models"]
    flags = ["add", str(YOLOX), "--name", "nano", "--no-load", "--json"]
    done = subprocess.run([*program, *flags], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    placement = json.loads(done.stdout)["placement"]
    assert placement["device"] == "gpu", placement
    assert placement["why"].startswith("runs on the GPU in FP")
    config = read_proto(tmp_path / "models" / "nano" / "config.pbtxt")
    assert config.instance_group[0].kind == config.instance_group[0].KIND_GPU
    assert config.parameters["precision"].string_value == placement["precision"]

    async def served() -> tuple[str, str]:
        engine = EmbeddedEngine((tmp_path / "models",))
        await engine.load("nano")
        facts = engine.facts("nano")
        await engine.aclose()
        return facts.provider, facts.precision

    assert asyncio.run(served()) == ("cuda", placement["precision"])
    done = subprocess.run([*program, "check", "nano", "--json"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout
