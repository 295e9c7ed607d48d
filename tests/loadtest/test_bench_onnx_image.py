"""The bench of /image on the GPU by on the CPU: its models, its ratio, and a miniature run on the CPU."""

import json
import shutil
from pathlib import Path

import pytest

from loadtest.bench.gpu.figures import PointRun, ratios_of
from loadtest.bench.gpu.onnx_image import add_both, main
from loadtest.bench.gpu.report import main as report
from loadtest.bench.wire import BadAnswer
from penstock.engines.config_pbtxt import read_proto
from penstock.engines.ort_serving.threads import available_cores
from penstock.gpu.telemetry.reader import has_driver

STREET = Path(__file__).resolve().parents[2] / "server" / "penstock" / "models" / "shipped" / "street"
pytestmark = pytest.mark.xdist_group("bench-onnx-image")


def test_cpu_copy_has_an_instance_of_one_thread_a_core(tmp_path: Path) -> None:
    """The copy on the CPU uses all cores, and its config is named after its folder."""
    gpu, cpu = add_both(STREET, tmp_path, is_gpu=False)
    assert (gpu.on, cpu.on, gpu.model) == ("gpu", "cpu", "street")
    config = read_proto(tmp_path / "models" / cpu.name / "config.pbtxt")
    assert config.name == cpu.name == "street-cpu"
    assert [(group.kind, group.count) for group in config.instance_group] == [(2, available_cores())]
    assert config.parameters["intra_op_thread_count"].string_value == "1"


@pytest.mark.skipif(has_driver(), reason="there is an NVIDIA driver")
def test_model_that_is_not_placed_on_a_gpu_is_not_measured(tmp_path: Path) -> None:
    """Without a GPU the bench says why instead of comparing the CPU with itself."""
    with pytest.raises(BadAnswer, match=r"street runs on the CPU.* a GPU was not tried: there is no"):
        add_both(STREET, tmp_path, is_gpu=True)


def test_ratio_is_of_two_runs_of_one_round() -> None:
    """Each round's rate on the GPU is divided by the rate on the CPU of the same round."""
    rates = [(1, "gpu", 600.0), (1, "cpu", 100.0), (2, "cpu", 90.0), (2, "gpu", 450.0), (3, "gpu", 1.0)]
    runs = [PointRun("image", number, {"model": "m", "on": on}, {"rate": rate}, "m") for number, on, rate in rates]
    (row,) = ratios_of(runs)
    assert (row["measure"], row["rounds"]) == ("image_gpu_by_cpu", 2)
    assert row["value"] == {"median": 5.5, "low": 5.0, "high": 6.0}


def test_miniature_run_on_the_cpu_is_measured_and_reported(tmp_path: Path) -> None:
    """One gateway serves both models; each run has a rate and the server's CPU time, and the report shows them."""
    media = tmp_path / "media"
    media.mkdir()
    shutil.copyfile(STREET / "golden.jpg", media / "street.jpg")
    file = tmp_path / "image.json"
    short = ["--rounds", "1", "--seconds", "0.4", "--settle", "0.2", "--callers", "2", "--generators", "1"]
    assert main([str(STREET), "--media", str(media), "--no-gpu", "--json", str(file), *short]) == 0
    content = json.loads(file.read_text())
    rows = {row["on"]: row for row in content["results"] if row["kind"] == "image"}
    assert min(rows[on]["rate"]["median"] for on in ("gpu", "cpu")) > 0
    assert min(rows[on]["server_cpu_ms"]["median"] for on in ("gpu", "cpu")) > 0.1
    assert report([str(file)]) == 0
    assert "/image of a gateway with the embedded engine" in file.with_suffix(".md").read_text()
