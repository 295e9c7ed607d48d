"""The rows and lines of `penstock models list`."""

from pathlib import Path

from penstock.cli.model_list import model_rows, reason_lines
from penstock.protocol.engine import ModelState
from penstock.protocol.model_reports import RunsOn


def test_list_says_which_models_run_on_a_gpu_and_which_do_not_though_they_should() -> None:
    """A model on a GPU has device, precision and graphs; those on the CPU are in one line."""
    on = {
        "fast": RunsOn("cuda:0", "fp16", [1, 2, 8]),
        "engine": RunsOn("tensorrt_rtx:0", "fp32"),
        "slow": RunsOn("cuda:1", "fp32", [], ["no CUDA graph: the model has variable dimensions"]),
        "fallen": RunsOn("cpu", "fp32", [], ["the model runs on the CPU instead of GPU 0: no driver"]),
        "plain": RunsOn("cpu", "fp32"),
    }
    index = [ModelState(name, "1", "READY") for name in on]
    rows = model_rows(installed=[], home_repository=Path("none"), catalogue={}, index=index, runs_on=on)
    assert reason_lines(rows) == [
        "fast: runs on cuda:0 in FP16, CUDA graphs for 1, 2, 8",
        "engine: runs on tensorrt_rtx:0 in FP32",
        "slow: runs on cuda:1 in FP32; no CUDA graph: the model has variable dimensions",
        "fallen: the model runs on the CPU instead of GPU 0: no driver",
        "on the CPU: fallen, plain",
    ]
    assert rows[0].runs_on == on["fast"]
