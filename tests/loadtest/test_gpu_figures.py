"""From the runs of the GPU bench to rows, ratios, verdicts, a report; and the folders and outcomes on the way."""

import json
import sys
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from loadtest.bench.gpu.__main__ import _driver, main, parse_arguments
from loadtest.bench.gpu.callers import CallerLane, CallerRequest, CallersRun
from loadtest.bench.gpu.chart import MODES, ChartPlan, whole_plan
from loadtest.bench.gpu.faults import outcome_of
from loadtest.bench.gpu.figures import PointLedger, limit_text, ratios_of, rows_of
from loadtest.bench.gpu.generators import ScheduleRun
from loadtest.bench.gpu.jpeg import rate_figures
from loadtest.bench.gpu.programs import find_perf_analyzer, rate_text
from loadtest.bench.gpu.report import main as report
from loadtest.bench.gpu.stretch import figures_of
from loadtest.bench.gpu.tritons import (
    Region,
    Variant,
    face_of,
    read_config,
    region_bytes,
    tensor_request,
    write_variant,
)
from loadtest.bench.wire import BadAnswer
from penstock_load.committed import read_bench
from penstock_load.results import State
from penstock_load.targets import read_targets
from tests.loadtest.gpu_figures import CONDITIONS, made_up

CONFIG = """
name: "net" backend: "torch" max_batch_size: 64
input [{ name: "image" data_type: TYPE_FP32 dims: [3, 4, 4] }]
output [{ name: "logits" data_type: TYPE_FP32 dims: [10] }]
instance_group [{ count: 4 }] dynamic_batching { }
parameters { key: "batch_owner" value { string_value: "gateway" } }
parameters { key: "precision" value { string_value: "fp16" } }
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder."""
    folder = tmp_path / "net"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.pt2").write_bytes(b"weights")
    (folder / "config.pbtxt").write_text(CONFIG)
    return folder


def variant(model: Path, tmp_path: Path, wanted: Variant, *, is_gpu: bool = True) -> model_config_pb2.ModelConfig:
    """The configuration of a copy."""
    write_variant(model, tmp_path / "copies", wanted, is_gpu=is_gpu)
    assert (tmp_path / "copies" / wanted.name / "1" / "model.pt2").read_bytes() == b"weights"
    return read_config(tmp_path / "copies" / wanted.name)


def test_ratios_are_of_runs_of_the_same_round(tmp_path: Path) -> None:
    """A round that was slow for both is no spread of the ratio."""
    ledger = PointLedger(tmp_path / "gpu.json", {}, "net")
    for number, speed in ((1, 1.0), (2, 0.5)):
        ledger.add("chart", number, {"mode": "none", "clients": 8}, {"rate": 1000 * speed})
        ledger.add("chart", number, {"mode": "mps", "clients": 8}, {"rate": 3000 * speed})
    found = {ratio.measure: ratio.values for ratio in ratios_of(ledger.runs)}
    assert found["mps_ratio_8"] == [3.0, 3.0]
    assert found["mps_ratio"] == [3.0, 3.0]
    assert found["batching_over_mps"] == []


def test_batching_is_held_against_mps_without_a_limit_at_the_most_clients_of_both(tmp_path: Path) -> None:
    """That is another part of the run: which the words say."""
    ledger = PointLedger(tmp_path / "gpu.json", {}, "net")
    for clients, rate in ((8, 1000.0), (16, 3000.0), (47, 9000.0)):
        ledger.add("chart", 1, {"mode": "batching", "clients": clients}, {"rate": rate})
        ledger.add("chart", 1, {"mode": "mps+batching", "clients": clients}, {"rate": rate / 3})
    for clients in (8, 16):
        ledger.add("whole", 1, {"mode": "mps-whole", "clients": clients}, {"rate": 500.0})
    found = {ratio.measure: ratio for ratio in ratios_of(ledger.runs)}
    assert found["batching_over_whole_mps"].values == [6.0]
    assert found["mps_batching_over_whole_mps"].values == [2.0]
    assert found["batching_over_whole_mps"].of.endswith("at 16 clients, measured after it")


@pytest.mark.parametrize(
    ("clients", "points"),
    [
        ((1, 8, 16, 47), [("none", 8), ("none", 16), ("mps-whole", 8), ("mps-whole", 16), ("mps-whole", 47)]),
        ((4,), [("none", 4), ("mps-whole", 4)]),
        ((2, 20), [("none", 20), ("mps-whole", 20)]),
    ],
)
def test_mps_without_a_limit_is_measured_at_the_most_clients_too(
    clients: tuple[int, ...], points: list[tuple[str, int]]
) -> None:
    """Beside it stand the clients that targets speak of without MPS, and no more: they are not started."""
    assert whole_plan(ChartPlan(dict.fromkeys(MODES, clients), 4, 12)).points == points


def test_incomplete_part_is_reported(tmp_path: Path) -> None:
    """Fewer rounds than the others."""
    ledger = made_up(tmp_path / "gpu.json")
    ledger.runs = [run for run in ledger.runs if (run.part, run.round) not in (("jpeg", 3), ("jpeg rate", 3))]
    ledger.save()
    assert report([str(tmp_path / "gpu.json")]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "* **jpeg was cut**: 2 of 3 rounds" in page
    assert page.count("was cut") == 1


def test_rows_have_what_every_run_of_theirs_has() -> None:
    """A figure that one run lacks (no card was read) is not made up for its row."""
    ledger = PointLedger(Path("unused"), {}, "net")
    ledger.add("raw", 1, {"batch": 1}, {"rate": 10.0, "sm_activity": 0.5, "p99_ms": float("inf")})
    ledger.add("raw", 2, {"batch": 1}, {"rate": 30.0})
    (row,) = rows_of(ledger.runs)
    assert (row.rounds, row.figures.keys()) == (2, {"rate"})
    assert (row.figures["rate"].low, row.figures["rate"].high) == (10.0, 30.0)


def later(path: Path, **conditions: str) -> PointLedger:
    """A second run into the file of a first one."""
    stated = CONDITIONS | {"command": "python -m loadtest.bench.gpu --add", "at": "later"} | conditions
    ledger = PointLedger(path, stated, "another-random")
    ledger.take_over()
    return ledger


def test_a_later_run_adds_to_the_file_and_replaces_the_parts_that_it_measures(tmp_path: Path) -> None:
    """A lent card is lent for minutes: one file of two runs says both commands, and which model each part asked."""
    made_up(tmp_path / "gpu.json")
    ledger = later(tmp_path / "gpu.json")
    ledger.save()
    assert (
        sum(row["part"] == "jpeg" for row in json.loads(ledger.path.read_text())["laps"]) == 6  # plain-english: ok
    )  # until it is measured
    ledger.add("jpeg", 1, {"decoded_by": "engine"}, {"held_per_s": 7.0})
    ledger.save()

    content = json.loads(ledger.path.read_text())
    models = {row["kind"]: row["model"] for row in content["results"] if row["kind"] != "ratio"}
    assert models == dict.fromkeys(("chart", "whole", "raw", "served", "fault"), "resnet50-torch-random") | {
        "jpeg": "another-random"
    }
    rows = content["laps"]  # plain-english: ok
    assert [row["figures"] for row in rows if row["part"].startswith("jpeg")] == [{"held_per_s": 7.0}]
    assert content["conditions"]["command"].endswith("--json gpu.json; python -m loadtest.bench.gpu --add")
    assert content["facts"]["failures"] == ["raw and served: the card was gone"]


def test_served_is_never_held_against_raw_of_another_run(tmp_path: Path) -> None:
    """Both are replaced when either is measured anew; their failures are removed."""
    made_up(tmp_path / "gpu.json")
    ledger = later(tmp_path / "gpu.json")
    ledger.tried.add("raw and served")
    ledger.add("served", 1, {"processes": 8, "batch": 64, "memory": "cuda"}, {"rate": 9e9})
    ledger.save()

    content = json.loads(ledger.path.read_text())
    assert not any(row.get("measure") == "raw_share" for row in content["results"])
    assert content["facts"]["failures"] == []


def test_file_of_other_conditions_is_not_added_to(tmp_path: Path) -> None:
    """Another card's figures, or those of another SLO, would stand under one heading."""
    made_up(tmp_path / "gpu.json")
    with pytest.raises(BadAnswer, match="is of slo_p99_ms '15' and this run of '50'"):
        later(tmp_path / "gpu.json", slo_p99_ms="50")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(BadAnswer, match="it is no file of this bench"):
        later(tmp_path / "other.json")


def test_report_of_a_part_that_was_cut_amid_a_pair_leaves_that_out(tmp_path: Path) -> None:
    """MPS without a limit was measured, and what it is held against was not."""
    ledger = made_up(tmp_path / "gpu.json", parts=("chart",))
    ledger.runs = [run for run in ledger.runs if (run.part, run.key["mode"]) != ("whole", "none")]
    ledger.save()
    assert report([str(tmp_path / "gpu.json")]) == 0


def test_best_served_is_held_to_best_raw_whatever_their_batches() -> None:
    """The floor speaks of the batch size that is best for each."""
    ledger = PointLedger(Path("unused"), {}, "net")
    for part, batch, rate in (("raw", 64, 100.0), ("raw", 128, 90.0), ("served", 64, 80.0), ("served", 128, 96.0)):
        ledger.add(part, 1, {"batch": batch}, {"rate": rate})
    (ratio,) = ratios_of(ledger.runs)
    assert (ratio.measure, ratio.values) == ("raw_share", [0.96])
    assert ratio.of == "served (batch 128) by raw (batch 64)"


def test_jpeg_is_judged_by_the_way_that_holds_more() -> None:
    """Both ways to decode are measured; the better one answers to the target."""
    ledger = PointLedger(Path("unused"), {}, "net")
    for way, held in (("gateway", 5000.0), ("engine", 9000.0)):
        ledger.add("jpeg", 1, {"decoded_by": way}, {"held_per_s": held}, model=f"of-{way}")
    (ratio,) = ratios_of(ledger.runs)
    assert (ratio.values, ratio.model) == ([9000.0], "of-engine")


def test_committed_file_gets_the_verdicts_of_the_targets(tmp_path: Path) -> None:
    """What a run on an H200 with 16 cores measured passes or fails; a V100's figures are only stood beside it."""
    made_up(tmp_path / "gpu.json")
    judged = read_bench(tmp_path / "gpu.json", read_targets())
    assert judged is not None
    states = {verdict.target_id: verdict.state for verdict in judged.verdicts}
    assert states["h200-mps-8"] is State.PASS
    assert states["h200-mps-16"] is State.FAIL
    assert states["h200-raw"] is State.PASS
    assert states["h200-jpeg"] is State.PASS
    assert states["mps-7x"] is State.NOT_COMPARABLE
    assert judged.on == "1 × NVIDIA H200, Imagined 3000, 16 cores"


def test_report_of_recorded_figures_has_every_part_and_its_plots(tmp_path: Path) -> None:
    """From the file alone: verdicts, chart, activity, served, JPEG, faults, and what could not be measured."""
    made_up(tmp_path / "gpu.json")
    assert report([str(tmp_path / "gpu.json")]) == 0
    page = (tmp_path / "report.md").read_text()
    for plot in ("chart", "activity", "served", "jpeg"):
        assert f"![{plot}]({plot}.png)" in page
        assert (tmp_path / f"{plot}.png").read_bytes()[:4] == b"\x89PNG"
    assert "| 16 one-image clients with MPS by the same without, on an H200 | 3.5" in page
    assert "**fail**" in page
    assert "its own (12 requests); 0 of 1 others (0 requests)" in page
    assert "| 0.03 s, from 0.50 s on |" in page
    assert "**not measured**: raw and served: the card was gone" in page
    assert "driver 580.159.04" in page
    assert "a client may use 15 % of the card's threads" in page
    assert "| 8 | 1,0" in page.split("## MPS alone, without a limit of threads")[1]


def test_report_of_a_run_that_was_cut_tells_what_it_had(tmp_path: Path) -> None:
    """Only the chart was measured: no heading speaks of the rest."""
    made_up(tmp_path / "gpu.json", parts=("chart",), rounds=1)
    assert report([str(tmp_path / "gpu.json")]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "## The chart" in page
    assert "JPEG over HTTP to" not in page
    assert not (tmp_path / "jpeg.png").exists()


def test_report_of_another_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and the file is named."""
    other = tmp_path / "other.json"
    other.write_text('{"results": []}')
    assert report([str(other)]) == 1
    assert capsys.readouterr().err.startswith(f"report: {other} is no file of the GPU bench: ")


@pytest.mark.parametrize(
    ("figures", "mode", "words"),
    [
        ({"sm_activity": 0.95, "machine_cores": 3.0}, "mps", "hold work nearly all the time"),
        ({"sm_activity": 0.4, "machine_cores": 15.2}, "mps", "the CPU is the limit"),
        (
            {"sm_activity": 0.4, "machine_cores": 3.0, "p50_ms": 2.0},
            "mps",
            "neither card nor cores are full: an answer takes 2 ms",
        ),
        ({"sm_activity": 0.3, "machine_cores": 3.0}, "none", "the processes take turns"),
        ({"sm_activity": 0.3, "machine_cores": 15.2}, "none", "the CPU is the limit"),
        ({"sm_activity": 0.5, "memory_bandwidth_activity": 0.85}, "mps", "memory bandwidth is the limit"),
    ],
)
def test_limit_is_named_from_the_readings(figures: dict[str, float], mode: str, words: str) -> None:
    """Card, cores, bandwidth, turns, or each request's own way."""
    ledger = PointLedger(Path("unused"), {}, "net")
    ledger.add("chart", 1, {"mode": mode, "clients": 8}, figures)
    assert words in limit_text(rows_of(ledger.runs)[0], 16)


def test_client_of_the_chart_is_one_instance_without_batches(model: Path, tmp_path: Path) -> None:
    """Its own process and context, whatever the model that it is a copy of says."""
    config = variant(model, tmp_path, Variant("client-00", in_flight=2))
    assert config.parameters["batches-in-flight"].string_value == "2"
    assert (config.name, config.max_batch_size, config.HasField("dynamic_batching")) == ("client-00", 1, False)
    assert config.instance_group[0].count == 1
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert "batch_owner" not in config.parameters
    assert config.parameters["precision"].string_value == "fp16"


def test_batched_copy_has_tritons_batches_and_the_buckets_that_are_run(model: Path, tmp_path: Path) -> None:
    """Triton forms them, on as many instances as asked; on a CPU where there is no GPU."""
    wanted = Variant("b", instances=3, max_batch_size=128, has_dynamic_batching=True, buckets=(1, 128))
    config = variant(model, tmp_path, wanted, is_gpu=False)
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (128, True)
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert config.parameters["batch-buckets"].string_value == "1;128"


def test_tensor_request_names_the_places_of_its_rows(model: Path) -> None:
    """Inputs from the region's begin, outputs behind the rows that are sent."""
    face = face_of(read_config(model))
    assert region_bytes(face, 2) == 2 * (192 + 40)
    head, _, body = tensor_request("net", face, Region("r", "system"), 2).partition(b"\r\n\r\n")
    asked = json.loads(body)
    assert f"Content-Length: {len(body)}".encode() in head
    assert asked["inputs"][0]["shape"] == [2, 3, 4, 4]
    assert asked["outputs"][0]["parameters"]["shared_memory_offset"] == 2 * 192


def test_face_of_a_model_of_two_inputs_is_refused(model: Path) -> None:
    """One sentence instead of figures that mean something else."""
    config = text_format.Parse(CONFIG, model_config_pb2.ModelConfig())
    config.input.add(name="more")
    with pytest.raises(BadAnswer, match="takes 2 inputs"):
        face_of(config)


def test_run_with_a_failed_request_has_no_figure() -> None:
    """A rate with failures in it would be too good."""
    run = CallersRun([CallerRequest(0, 0.1, 5.0), CallerRequest(0, 0.2, 5.0, "503: full")], 1.0, 0.1)
    with pytest.raises(BadAnswer, match="client-00 answered 503: full"):
        figures_of(run, [CallerLane("client-00", 1, b"")])


def test_run_counts_rows_not_requests() -> None:
    """A request of 64 pictures is 64."""
    figures = figures_of(
        CallersRun([CallerRequest(0, 0.1, 5.0), CallerRequest(0, 0.2, 7.0)], 2.0, 0.1),
        [CallerLane("a", 1, b"", rows=64)],
    )
    assert (figures["rate"], figures["p99_ms"]) == (64.0, 7.0)


def test_rate_with_refusals_has_them_in_its_percentiles() -> None:
    """What got no good answer is as late as can be: shedding does not make a p99 better."""
    run = ScheduleRun([1.0] * 97, [0.0] * 100, {"503": 3}, 0, 0.1)
    figures = rate_figures(run, 100, 1.0, 15.0)
    assert (figures["in_time"], figures["p99_ms"], figures["p50_ms"]) == (0.97, float("inf"), 1.0)


def test_fault_tells_who_failed_and_when_all_were_served_again() -> None:
    """The victim's mates are apart; a caller that is never answered again leaves no recovery."""
    lanes = [CallerLane("a", 1, b""), CallerLane("b", 1, b"")]
    asks = [
        CallerRequest(0, 0.9, 1.0),
        CallerRequest(1, 0.9, 1.0),
        CallerRequest(0, 1.2, 1.0, "500"),
        CallerRequest(1, 2.0, 1.0),
        CallerRequest(0, 3.5, 1.0),
    ]
    outcome = outcome_of(CallersRun(asks, 5.0, 0.1), lanes, 1.0, fault="killed", victim="a", note="")
    assert (outcome.failed, outcome.recovery_s) == ({"a": 1}, 2.5)
    assert outcome.silent_s == {"a": 2.5, "b": 1.5}
    silent = outcome_of(CallersRun(asks[:4], 5.0, 0.1), lanes, 1.0, fault="killed", victim="a", note="")
    assert silent.recovery_s is None
    hung = outcome_of(CallersRun([asks[1], asks[3]], 5.0, 0.1), lanes, 1.0, fault="killed", victim="a", note="")
    assert (hung.failed, hung.recovery_s) == ({}, None)


def test_bench_without_a_gpu_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, nothing started, no traceback."""
    from penstock.gpu.nvml import read_cards

    if read_cards().cards:
        pytest.skip("there is a GPU here")
    assert main(["--json", str(tmp_path / "gpu.json"), "--source", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("gpu: no GPU to measure (")
    assert message.count("\n") == 1


def test_bench_without_nvml_has_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """--no-gpu runs where the binding is not installed, too."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _driver() == "no driver"


@pytest.mark.parametrize("arguments", [["--only", "chart,tea"], ["--clients", "48"], ["--rounds", "0"]])
def test_options_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    with pytest.raises(SystemExit):
        parse_arguments("", arguments)
    assert "error:" in capsys.readouterr().err


def test_perf_analyzers_last_throughput_is_its_rate() -> None:
    """Of several windows and a client's and a server's section, what it ends with."""
    report_of_it = "  Throughput: 12.5 infer/sec\n  p50 latency: 1 usec\n  Throughput: 5460.12 infer/sec\n"
    assert rate_text(report_of_it) == "5,460 inferences/s"
    assert rate_text("Failed to obtain stable measurement") == ""


def test_perf_analyzer_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is not there is none, and the bench goes on without."""
    monkeypatch.setenv("PENSTOCK_PERF_ANALYZER", str(tmp_path / "absent"))
    assert find_perf_analyzer() is None
