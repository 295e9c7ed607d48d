"""The GPU bench: its load over plain sockets, its figures and ratios, its report."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from loadtest.bench.gpu import stretch
from loadtest.bench.gpu.__main__ import main, parse_arguments
from loadtest.bench.gpu.callers import CallerLane, CallerRequest, CallersRun, run_callers
from loadtest.bench.gpu.chart import MODES, ChartPlan, EnginePlan, points_of
from loadtest.bench.gpu.figures import PointLedger, ratios_of, rows_of
from loadtest.bench.gpu.generators import Schedule, ScheduleRun, run_schedule
from loadtest.bench.gpu.jpeg import rate_figures, stage_figures
from loadtest.bench.gpu.report import main as report
from loadtest.bench.gpu.stretch import figures_of, server_statistics
from loadtest.bench.gpu.tritons import (
    Region,
    Variant,
    face_of,
    http_post,
    read_config,
    region_bytes,
    tensor_request,
    write_variant,
)
from loadtest.bench.wire import BadAnswer
from penstock.gpu.nvml import read_cards
from penstock_load.committed import read_bench
from penstock_load.results import State
from penstock_load.targets import read_targets

REQUEST = http_post("/v2", b"x", "image/jpeg")
CONDITIONS = {
    "cpu": "Imagined 3000, 16 cores, load 1.0",
    "machine": "1 × NVIDIA H200, Imagined 3000, 16 cores",
    "at": "2026-11-22 21:00 UTC",
    "versions": "Python 3.12.3",
    "gpu versions": "driver 580.159.04, torch 2.11.0, Triton 2.51",
    "command": "python -m loadtest.bench.gpu --json gpu.json",
    "slo_p99_ms": "15",
}


@contextmanager
def serving(status_of: Callable[[int], int]) -> Iterator[int]:
    """The port of a server whose n-th answer has this status; 0: it closes the connection."""
    numbers, lock = iter(range(1 << 30)), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                status = status_of(next(numbers))
            self.close_connection = not status
            if status:
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_closed_loop_continues_after_refusals_and_broken_connections() -> None:
    """Each lane sends its next request when it is answered; a failure has its reason and a new connection follows."""
    with serving(lambda number: {2: 503, 3: 0}.get(number, 200)) as port:
        lanes = [(number, CallerLane("a", port, REQUEST)) for number in range(2)]
        run = run_callers(lanes, time.monotonic(), 0.0, 0.5)
    failures = sorted(ask.failure for ask in run.asks if ask.failure)
    assert failures[0] == "503: ok"
    assert len(failures) == 2
    assert {ask.lane for ask in run.asks if not ask.failure} == {0, 1}


def test_open_loop_counts_from_the_moment_due_however_late_it_was_sent() -> None:
    """With one connection, the second of two that are due together waits for the first, and that counts."""
    with serving(lambda number: time.sleep(0.1 * (number == 0)) or (503 if number == 2 else 200)) as port:
        schedule = Schedule(port, (REQUEST,), (0.0, 0.0, 0.15), connections=1)
        run = run_schedule(schedule, time.monotonic())
    assert len(run.latencies_ms) == 2
    assert min(run.latencies_ms) >= 95
    assert max(run.late_ms) >= 95
    assert (run.failures, run.unsent) == ({"503": 1}, 0)


def test_figures_count_rows_and_refuse_failures() -> None:
    """A request of 64 pictures is 64; a rate with failures in it would be too good, and so would a p99."""
    answered = [CallerRequest(0, 0.1, 5.0), CallerRequest(0, 0.2, 7.0)]
    figures = figures_of(CallersRun(answered, 2.0, 0.1), [CallerLane("a", 1, b"", rows=64)])
    assert (figures["rate"], figures["p99_ms"]) == (64.0, 7.0)
    with pytest.raises(BadAnswer, match="a answered 503: full"):
        figures_of(CallersRun([CallerRequest(0, 0.2, 5.0, "503: full")], 1.0, 0.1), [CallerLane("a", 1, b"")])
    shed = rate_figures(ScheduleRun([1.0] * 97, [0.0] * 100, {"503": 3}, 0, 0.1), 100, 1.0, 15.0)
    assert (shed["in_time"], shed["p99_ms"], shed["p50_ms"]) == (0.97, float("inf"), 1.0)


def test_stages_are_read_from_the_answers_themselves() -> None:
    """Percentiles of each stage over the sampled answers; nothing where none was sampled."""
    stages = {"decode": 0.1, "preprocess": 0.0, "queue": 1.0, "infer": 2.0, "postprocess": 0.2}
    answers = [
        json.dumps({"batch_size": size, "timings_ms": stages | {"total": size * 1.0}}).encode() for size in (4, 8)
    ]
    figures = stage_figures(answers)
    assert (figures["batch_size"], figures["queue_p99_ms"]) == (6.0, 1.0)
    assert (figures["total_p50_ms"], figures["total_p99_ms"]) == (4.0, 8.0)
    assert stage_figures([]) == {}


FACTS = {"raw and served ready after s": 21.2, "raw and served took s": 55.2, "jpeg took s": 110.5}


def facts_of(ledger: PointLedger) -> dict[str, object]:
    """The saved ones, without the failures."""
    facts: dict[str, object] = json.loads(ledger.path.read_text())["facts"]
    return {name: value for name, value in facts.items() if name != "failures"}


def ledger_of(path: Path, rounds: int = 3) -> PointLedger:
    """Made-up figures, saved."""
    ledger = PointLedger(path, dict(CONDITIONS), "resnet50-torch-random")
    rates = {"none": 1000.0, "mps": 3500.0, "mps-unlimited": 2800.0, "batching": 5000.0, "mps+batching": 7000.0}
    rates["mps+shared"] = 8400.0
    for number in range(1, rounds + 1):
        for mode, rate in rates.items():
            for clients in (8, 16):
                figures = {"rate": rate * number, "sm_activity": 0.5, "p99_ms": float("inf")}
                ledger.add("chart", number, {"mode": mode, "clients": clients}, figures)
                ledger.add("plain-chart", number, {"mode": mode, "clients": clients}, {"rate": rate})
        for part, batch, rate in (("raw", 64, 990.0), ("raw", 128, 1000.0), ("served", 64, 960.0)):
            ledger.add(part, number, {"batch": batch}, {"rate": rate})
        for way, held in (("gateway", 5000.0), ("engine", 9000.0)):
            ledger.add("jpeg", number, {"decoded_by": way}, {"held_per_s": held}, model=f"resnet50-{way}-random")
    ledger.failures = ["faults: the GPU was gone"]
    ledger.facts = dict(FACTS)
    ledger.save()
    return ledger


def test_ratios_are_of_runs_of_the_same_round_and_of_the_better_ways(tmp_path: Path) -> None:
    """A round that was slow for both is no spread of the ratio; what one run lacks is not in its row."""
    ledger = ledger_of(tmp_path / "gpu.json")
    found = {row["measure"]: row for row in ratios_of(ledger.runs)}
    ratios = {"mps_ratio_8": 3.5, "mps_ratio": 3.5, "batching_over_mps": 2.0, "raw_share": 0.96}
    ratios |= {"mps_ratio_16_plain": 3.5, "batching_over_mps_8": 2.5, "batching_over_mps_16_plain": 2.5}
    ratios |= {"shared_over_mps_8": 3.0, "shared_over_mps_16": 3.0}
    for measure, ratio in ratios.items():
        assert {found[measure]["value"][key] for key in ("median", "low", "high")} == {ratio}, measure
    assert (found["knee_per_s"]["value"]["median"], found["knee_per_s"]["model"]) == (9000.0, "resnet50-engine-random")
    ledger.add("raw", 4, {"batch": 64}, {"p50_ms": 1.0})
    assert next(row for row in rows_of(ledger.runs) if row.part == "raw").figures == {}


def test_fused_program_is_compared_with_the_plain_one_of_the_same_round(tmp_path: Path) -> None:
    """For each batch, raw and served; and the share of raw that is served is the fused program's."""
    ledger = PointLedger(tmp_path / "gpu.json", dict(CONDITIONS), "resnet50-torch-random")
    for number in (1, 2, 3):
        for part, rate in (("raw", 1000.0), ("served", 950.0)):
            for batch, gain in ((1, 2.5), (64, 2.0)):
                key: dict[str, str | int] = {"processes": 1, "batch": batch, "memory": "cuda"}
                ledger.add(part, number, key, {"rate": rate * batch * number})
                ledger.add(part, number, key | {"form": "plain"}, {"rate": rate * batch * number / gain})
                ledger.add(part, number, key | {"form": "plain", "memory": "system"}, {"rate": 1.0})
    found = {row["measure"]: row["value"]["median"] for row in ratios_of(ledger.runs)}
    wanted = {
        f"fused_by_plain_{part}_{batch}": gain for part in ("raw", "served") for batch, gain in ((1, 2.5), (64, 2.0))
    }
    assert found == pytest.approx(wanted | {"raw_share": 0.95})


def test_each_form_is_compared_at_its_best_callers_and_memory(tmp_path: Path) -> None:
    """Two callers fill the plain program's GPU time, but not the fused one's, which is shorter."""
    ledger = PointLedger(tmp_path / "gpu.json", dict(CONDITIONS), "resnet50-torch-random")
    for number in (1, 2, 3):
        for callers, fused, plain in ((2, 1600.0, 1000.0), (4, 2400.0, 960.0)):
            key: dict[str, str | int] = {"processes": 1, "batch": 1, "memory": "cuda", "callers": callers}
            ledger.add("served", number, key, {"rate": fused * number})
            ledger.add("served", number, key | {"form": "plain"}, {"rate": plain * number})
            ledger.add("served", number, key | {"memory": "system"}, {"rate": fused * number / 2})
    (ratio,) = ratios_of(ledger.runs)
    assert (ratio["measure"], ratio["value"]["median"]) == ("fused_by_plain_served_1", pytest.approx(2.4))
    wanted = "fused by plain, served (processes 1, batch 1, memory cuda, callers 4; processes 1, batch 1, memory cuda, "
    assert ratio["of"] == wanted + "callers 2, form plain)"
    engine = EnginePlan((1,), (8,), ("raw", "served"), ("fused",), ("cuda",), 3, (2, 4))
    points = [(point.callers, point.memory) for point in points_of(engine, ("cuda", "system"))]
    assert points == [(count, memory) for count in (0, 2, 4) for memory in ("cuda", "system")], "raw has no callers"


def test_tritons_own_times_are_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters are of all callers of a model; of several models there would be a call for each."""
    names = ("queue", "compute_input", "compute_infer", "compute_output")
    durations = {name: {"ns": 1000 * count} for count, name in enumerate(names, 1)}
    model = {"execution_count": 6, "inference_stats": {"success": {"count": 5}} | durations}
    monkeypatch.setattr(stretch, "ask", lambda *_: json.dumps({"model_stats": [model]}))
    lanes = [CallerLane("served-fused-0", 1, b"")] * 2
    found = {"executions": 6, "requests": 5, "queue": 1000, "input": 2000, "infer": 3000, "output": 4000}
    assert server_statistics(lanes) == found
    assert server_statistics([*lanes, CallerLane("served-fused-1", 1, b"")]) == {}


def test_file_gets_the_verdicts_of_the_targets_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the hardware that the targets are about; the page has each part and what was not measured."""
    path = tmp_path / "gpu.json"
    ledger_of(path)
    judged = read_bench(path, read_targets())
    assert judged is not None
    states = {verdict.target_id: verdict.state for verdict in judged.verdicts}
    wanted = {"h200-mps-8": State.PASS, "h200-mps-16": State.FAIL, "h200-raw": State.PASS, "h200-jpeg": State.PASS}
    wanted |= {"h200-mps-8-plain": State.PASS, "h200-batching-8": State.PASS, "h200-batching-16": State.FAIL}
    assert {name: states[name] for name in wanted} == wanted
    assert states["mps-7x"] is State.NOT_COMPARABLE
    assert report([str(path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "**not measured**: faults: the GPU was gone" in page
    assert "| mps | 8 | 7,000 (3,500 to 10,500) | 50 % |" in page
    path.write_text('{"results": []}')
    assert report([str(path)]) == 1
    assert f"report: {path} is no file of the GPU bench: " in capsys.readouterr().err


def test_later_run_replaces_the_parts_that_it_measures(tmp_path: Path) -> None:
    """A GPU is lent for minutes: one file of two runs has both commands; other conditions are refused."""
    ledger_of(tmp_path / "gpu.json")

    def later(**conditions: str) -> PointLedger:
        stated = CONDITIONS | {"command": "python -m loadtest.bench.gpu --add", "at": "later"} | conditions
        ledger = PointLedger(tmp_path / "gpu.json", stated, "another-random")
        ledger.take_over()
        return ledger

    ledger = later()
    ledger.facts = {"raw and served ready after s": 1.0, "jpeg took s": 0.1}
    ledger.save()
    assert facts_of(ledger) == FACTS, "it has no figures of a part yet"
    ledger.add("served", 1, {"batch": 64}, {"rate": 9.0})
    ledger.save()
    assert facts_of(ledger) == {"raw and served ready after s": 1.0, "jpeg took s": 110.5}
    content = json.loads(ledger.path.read_text())
    models = {row["kind"]: row["model"] for row in content["results"] if row["kind"] != "ratio"}
    assert models.pop("plain-chart") == "resnet50-torch-random"
    assert models == {"chart": "resnet50-torch-random", "served": "another-random", "jpeg": "resnet50-engine-random"}
    assert not any(row.get("measure") == "raw_share" for row in content["results"]), "raw is of another run"
    assert content["conditions"]["command"].endswith("--json gpu.json; python -m loadtest.bench.gpu --add")
    assert content["facts"]["failures"] == ["faults: the GPU was gone"], "of a part that was not measured again"
    with pytest.raises(BadAnswer, match="is of slo_p99_ms '15' and this run of '50'"):
        later(slo_p99_ms="50")
    ledger.path.write_text("[]")
    with pytest.raises(BadAnswer, match="it is no file of this bench"):
        later()


CONFIG = """
name: "net" backend: "torch" max_batch_size: 64
input [{ name: "image" data_type: TYPE_FP32 dims: [3, 4, 4] }]
output [{ name: "logits" data_type: TYPE_FP32 dims: [10] }]
instance_group [{ count: 4 }] dynamic_batching { }
parameters { key: "batch_owner" value { string_value: "gateway" } }
parameters { key: "precision" value { string_value: "fp16" } }
"""


def test_copies_of_the_model_have_the_instances_and_batches_of_their_mode(tmp_path: Path) -> None:
    """A client's copy is one instance without batches; the batched one has Triton's."""
    model = tmp_path / "net"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.pt2").write_bytes(b"weights")
    (model / "config.pbtxt").write_text(CONFIG)

    def variant(wanted: Variant, *, is_gpu: bool) -> model_config_pb2.ModelConfig:
        write_variant(model, tmp_path / "copies", wanted, is_gpu=is_gpu)
        assert (tmp_path / "copies" / wanted.name / "1" / "model.pt2").read_bytes() == b"weights"
        return read_config(tmp_path / "copies" / wanted.name)

    kinds = model_config_pb2.ModelInstanceGroup
    one = variant(Variant("client", in_flight=2), is_gpu=True)
    assert (one.max_batch_size, one.HasField("dynamic_batching"), "batch_owner" in one.parameters) == (1, False, False)
    assert (one.instance_group[0].count, one.instance_group[0].kind) == (1, kinds.KIND_GPU)
    assert one.parameters["batches-in-flight"].string_value == "2"
    assert one.parameters["precision"].string_value == "fp16"
    parameters = (("fuse", "0"),)
    wanted = Variant("b", 3, 128, has_dynamic_batching=True, buckets=(1, 128), delay_us=250, parameters=parameters)
    batched = variant(wanted, is_gpu=False)
    assert batched.dynamic_batching.max_queue_delay_microseconds == 250
    assert batched.parameters["fuse"].string_value == "0"
    assert (batched.max_batch_size, batched.HasField("dynamic_batching")) == (128, True)
    assert (batched.instance_group[0].count, batched.instance_group[0].kind) == (3, kinds.KIND_CPU)
    assert batched.parameters["batch-buckets"].string_value == "1;128"


def test_chart_asks_limited_and_unlimited_copies_and_one_batched_model() -> None:
    """Without MPS none is limited; the batched model is alike in both Tritons."""
    every = tuple(MODES.values())
    plan = ChartPlan("plain-chart", (1, 2), Variant("batched", 2, 64), every, 12, (("fuse", "0"),))
    assert replace(plan, modes=(MODES["none"],)).variants(has_mps=True) == []
    assert ChartPlan("chart", (8, 16), plan.batched).names("limited", 16)[0] == "limited-12-00"
    assert ChartPlan("chart", (8, 16), plan.batched).names("limited", 8)[7] == "limited-25-07"
    without, under = plan.variants(has_mps=False), plan.variants(has_mps=True)
    assert [one.name for one in without] == ["batched", "unlimited-00", "unlimited-01"]
    limited, unlimited = ["limited-12-00", "limited-12-01"], ["unlimited-00", "unlimited-01"]
    assert [one.name for one in under] == ["batched", "shared-01", "shared-02", *limited, *unlimited]
    assert without[0] == under[0] == Variant("batched", 2, 64, parameters=(("fuse", "0"),))
    assert under[2] == Variant("shared-02", 4, 64, parameters=(("fuse", "0"), ("program-process", "shared")))
    assert plan.names("shared", 2) == ["shared-02"]
    assert under[3].parameters == (("fuse", "0"), ("active-thread-percentage", "12"))
    assert under[5] == without[1] == Variant("unlimited-00", in_flight=2, parameters=(("fuse", "0"),))


def test_tensor_request_names_the_places_of_its_rows() -> None:
    """Inputs from the region's begin, outputs behind the rows; a model of two inputs is refused."""
    config = text_format.Parse(CONFIG, model_config_pb2.ModelConfig())
    face = face_of(config)
    assert region_bytes(face, 2) == 2 * (192 + 40)
    head, _, body = tensor_request("net", face, Region("r", "system"), 2).partition(b"\r\n\r\n")
    asked = json.loads(body)
    assert f"Content-Length: {len(body)}".encode() in head
    assert asked["inputs"][0]["shape"] == [2, 3, 4, 4]
    assert asked["outputs"][0]["parameters"]["shared_memory_offset"] == 2 * 192
    config.input.add(name="more")
    with pytest.raises(BadAnswer, match="takes 2 inputs"):
        face_of(config)


def test_bench_without_a_gpu_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, nothing started, no traceback; options that make no sense are refused."""
    with pytest.raises(SystemExit):
        parse_arguments(["--clients", "48"])
    if read_cards().cards:
        pytest.skip("there is a GPU here")
    capsys.readouterr()
    assert main(["--json", str(tmp_path / "gpu.json"), "--source", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("gpu: no GPU to measure (")
    assert message.count("\n") == 1
