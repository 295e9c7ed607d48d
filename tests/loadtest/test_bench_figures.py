"""How the benches come to their figures."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tritonclient.grpc import service_pb2

from loadtest.bench.child import Child
from loadtest.bench.closed_loop import MeasuredRepetition, Repetition, make_repetition, run_closed_loop
from loadtest.bench.gateway.before_after import CPU_MS, RATE, compare, median_interval
from loadtest.bench.gateway.image_endpoint import ImageRounds, result_of, table
from loadtest.bench.gateway.image_endpoint import parse_arguments as image_options
from loadtest.bench.report import spread, write_json
from loadtest.bench.stages import StageProcesses, StageRun
from loadtest.bench.wire import BadAnswer, BenchHttp, BenchRequest, GrpcPort, grpc_infer, http_infer
from penstock.protocol.inference import Datatype, Tensor
from penstock.vision.spec import PrepareSpec
from penstock_load.clients.payloads import make_pictures
from penstock_load.witness.process_cpu import NotListening, meter_of_port
from tests.loadtest.stand_in import running_stand_in

TENSOR = Tensor("x", Datatype.FP32, (1, 2), memoryview(b"12345678"))


async def test_closed_loop_keeps_so_many_calls_in_flight_and_no_more() -> None:
    """The concurrency is what was asked, and every answer is counted."""
    running = highest = calls = 0

    async def call(number: int) -> None:
        nonlocal running, highest, calls
        assert number == calls
        calls += 1
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0)
        running -= 1

    repetition = await run_closed_loop(call, concurrency=3, seconds=0.05)
    assert (highest, running, repetition.count) == (3, 0, calls)


async def test_closed_loop_with_a_failing_call_ends() -> None:
    """A figure with failures in it is no figure."""

    async def call(_: int) -> None:
        raise BadAnswer("503")

    with pytest.raises(BadAnswer):
        await run_closed_loop(call, concurrency=2, seconds=60)


def test_repetition_has_rate_and_quantiles_of_its_answers() -> None:
    """Quantiles are of the answers that were measured, none made up between them."""
    repetition = make_repetition([i / 1000 for i in range(100, 0, -1)], elapsed_s=2.0)
    assert repetition == Repetition(rate=50.0, p50_ms=50.0, p99_ms=99.0, count=100)


def test_image_result_divides_by_the_limit_of_the_same_round() -> None:
    """A noisy machine moves limit and endpoint together, so a ratio is taken within a round."""
    rounds = ImageRounds()
    for speed in (1.0, 0.5):
        rounds.decode.append(StageRun(300 * speed, 6.0))
        rounds.resize.append(StageRun(300 * speed, 6.0))
        rounds.outputs.append(StageRun(600 * speed, 3.0))
        rounds.engine.append(MeasuredRepetition(Repetition(600 * speed, 1, 2, 10), 0, 5, 1))
        rounds.endpoint.append(MeasuredRepetition(Repetition(80 * speed, 1, 2, 10), 9, 5, 1))
    result = result_of(image_options(["--model", "m"]), rounds)
    assert (result["ratio"].low, result["ratio"].high) == (pytest.approx(0.8), pytest.approx(0.8))
    assert result["limit_rate"].low == pytest.approx(50)
    assert result["slowest_ratio"].median == pytest.approx(80 / 300)
    assert "of the harmonic limit: 0.80 (0.80-0.80)" in table(result)


def test_image_result_takes_the_session_alone_where_the_engine_has_no_port() -> None:
    """The embedded engine runs in the gateway: its limit is ONNX Runtime alone, in a process a core."""
    rounds = ImageRounds()
    for stage in (rounds.decode, rounds.resize, rounds.outputs, rounds.session):
        stage.append(StageRun(400, 5.0))
    rounds.endpoint.append(MeasuredRepetition(Repetition(80, 1, 2, 10), 9, 0, 1))
    result = result_of(image_options(["--model", "m", "--engine-file", "model.onnx"]), rounds)
    assert (result["engine_rate"].median, result["limit_rate"].median) == (400, pytest.approx(100))
    assert "of the harmonic limit: 0.80 (0.80-0.80)" in table(result)


@pytest.mark.parametrize(("pairs", "low", "high"), [(6, 1, 6), (12, 3, 10), (20, 6, 15), (100, 40, 61)])
def test_median_interval_is_that_of_the_sign_test(pairs: int, low: int, high: int) -> None:
    """The ranks equal those in tables of the sign test; the order of the pairs does not matter."""
    found = median_interval([float(number) for number in range(pairs, 0, -1)])
    assert (found.low, found.high) == (low, high)
    assert found.median == (pairs + 1) / 2


def test_median_interval_of_few_pairs_is_refused() -> None:
    """Five pairs give no interval of 95 %."""
    with pytest.raises(ValueError, match="5 pairs give no interval of 95 %; measure at least 6"):
        median_interval([1.0] * 5)


def test_comparison_of_checkouts_is_above_one_where_the_new_one_is_better() -> None:
    """Twice the rate and half the CPU time both give a ratio of 2."""
    rate, cpu = compare("image", [{RATE: 100.0, CPU_MS: 4.0}] * 6, [{RATE: 200.0, CPU_MS: 2.0}] * 6)
    assert (rate.ratio.median, cpu.ratio.median) == (2.0, 2.0)


def test_json_report_states_its_conditions(tmp_path: Path) -> None:
    """Figures travel with hardware, versions and command."""
    write_json(tmp_path / "out.json", [spread([1.0])])
    body = json.loads((tmp_path / "out.json").read_text())
    assert body["results"] == [{"median": 1.0, "low": 1.0, "high": 1.0}]
    assert set(body["conditions"]) == {"cpu", "versions", "command", "machine", "at"}
    assert "cores" in body["conditions"]["cpu"]


def test_cpu_meter_counts_the_children_of_who_listens() -> None:
    """A program's cost includes its children's, also of those that have ended."""
    program = (
        "import socket, subprocess, sys; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True);"
        "input(); burn = 'import time\\nwhile time.process_time() < 0.3: pass';"
        "subprocess.run([sys.executable, '-c', burn]); print('burnt', flush=1); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin
        assert process.stdout
        meter = meter_of_port(int(process.stdout.readline()))
        before = meter.read_s()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "burnt\n"
        assert meter.read_s() - before >= 0.29
        process.stdin.write("\n")


def test_cpu_meter_of_a_closed_port_says_so() -> None:
    """The error names the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NotListening, match=str(port)):
        meter_of_port(port)


@pytest.mark.long
def test_stages_alone_have_a_rate_and_a_cost() -> None:
    """Decode and resize run on every core, and cost CPU time that fits their rate."""
    pictures = [picture.content for picture in make_pictures(2, seed=1, size=(160, 120))]
    with StageProcesses(pictures, PrepareSpec(width=64, height=64)) as stages:
        for run in (stages.decode_alone(0.1), stages.resize_alone(0.1)):
            assert run.rate > 0
            assert 0 < run.cpu_ms < 1000


def test_tensor_is_sent_behind_its_json_and_raw_in_grpc() -> None:
    """The JSON's length is in the header, and the rest of the body is the tensor; the message is tritonclient's."""
    request = http_infer("m", TENSOR)
    length = int(request.headers["Inference-Header-Content-Length"])
    described = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    assert (request.path, request.body[length:]) == ("/v2/models/m/infer", b"12345678")
    assert json.loads(request.body[:length])["inputs"] == [described]
    message = service_pb2.ModelInferRequest.FromString(grpc_infer("m", TENSOR))
    assert (message.model_name, list(message.raw_input_contents)) == ("m", [b"12345678"])
    assert (message.inputs[0].name, message.inputs[0].datatype, list(message.inputs[0].shape)) == ("x", "FP32", [1, 2])


async def test_ports_with_a_refusal_name_it() -> None:
    """A status other than success ends the bench with the server's own words."""
    with running_stand_in() as stand_in:
        stand_in.image_status, stand_in.image_body = 503, {"error": "full"}
        async with BenchHttp(stand_in.http_url) as http:
            with pytest.raises(BadAnswer, match=r"503.*full"):
                await http.post(BenchRequest("/v2/models/m/image", {}, b"x"))
        async with GrpcPort(stand_in.grpc_address) as grpc:
            assert await grpc.model_infer(grpc_infer("m", TENSOR))
            with pytest.raises(BadAnswer, match=r"UNAVAILABLE: the engine is down"):
                await grpc.model_infer(grpc_infer("broken", TENSOR))


def test_child_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """A grandchild in a session of its own that ignores SIGTERM is gone, too; a failure has the end of the log."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    start = f"subprocess.Popen([sys.executable, '-S', '-c', {deaf!r}], start_new_session=True)"
    code = f"import subprocess, sys, time; {start}; time.sleep(600)"
    child = Child("stubborn", [sys.executable, "-S", "-c", code], tmp_path / "log")
    child.wait(lambda: "deaf" in child.text(), time.monotonic() + 30.0)
    family = child.family()
    child.end()
    assert len(family) == 2
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    dead = Child("dead", [sys.executable, "-S", "-c", "raise SystemExit('no engine')"], tmp_path / "log")
    with pytest.raises(BadAnswer, match="dead ended with 1 while it started; its log ends:\nno engine"):
        dead.wait(lambda: False, time.monotonic() + 30.0)
    with pytest.raises(BadAnswer, match=r"x cannot be started \(/no/such: No such file or directory\)"):
        Child("x", ["/no/such"], tmp_path / "log")
