"""`penstock up --engine embedded`: the same contract on a machine without any Triton, ONNX Runtime in the gateway."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper, numpy_helper

from server.core.result import Detections
from server.vision.accuracy import average_precision, read_annotations
from tests.backends import onnx_models
from tests.conftest import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.integration.living import family, gateway_of, inflight, wait_for
from tests.integration.pictures import fastestdet_boxes, fastestdet_input, frames, jpeg
from tests.integration.test_image_endpoint import INPUT, OUTPUT, assert_same_boxes, thresholds
from tests.integration.test_models import penstock, state_of
from tests.integration.web import Answer, call, post_json
from tests.tiny_models import CONFIG, IDENTITY, write_model

pytestmark = pytest.mark.xdist_group("embedded")

NO_TRITON = {"PATH": "/nonexistent", "PENSTOCK_ENGINE_ENVIRONMENT": "/nonexistent"}
LOOKUP_CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "index" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "value" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
SLOW_CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "trips" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "done" data_type: TYPE_INT64 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 4 } ]
parameters { key: "canary" value { string_value: "off" } }
"""

LONG_CONFIG = """backend: "onnxruntime"
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "canary" value { string_value: "off" } }
"""


def start_embedded(
    folder: Path, *arguments: str, engine: str = "embedded", wait: bool = True, **environ: str
) -> RunningStack:
    """A stack where no Triton can be found, with the models of `folder`/models."""
    words = ("--engine", engine, "--model-repository", str(folder / "models"), *arguments)
    return start_stack(folder / "home", *words, environ=NO_TRITON | environ, wait=wait)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """ONNX models beside one of Triton's python backend; fastestdet where the real inputs are."""
    folder = tmp_path_factory.mktemp("embedded")
    write_models(folder / "models")
    fp32 = CONFIG.format(max_batch_size=8, data_type="TYPE_FP32", count=1)
    write_model(folder / "models", "script", IDENTITY, fp32)
    source = CHECKOUT.parent / "shared" / "models"
    if source.is_dir():
        pull = ["-m", "server.cli", "models", "pull", "fastestdet", "--from", str(source)]
        environ = dict(os.environ, PENSTOCK_HOME=str(folder / "home"))
        subprocess.run([sys.executable, *pull, "--url", "http://127.0.0.1:9"], check=True, env=environ, cwd=CHECKOUT)
    stack = start_embedded(folder)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def write_models(repository: Path) -> None:
    """lookup: a table's row; slow: as many products of matrices as it is asked for, four at once."""
    onnx_models.save(onnx_models.lookup(), repository, "lookup", config=LOOKUP_CONFIG)
    onnx_models.save(onnx_models.slow(), repository, "slow", config=SLOW_CONFIG)


def look_up(stack: RunningStack, index: int = 3) -> Answer:
    body = {"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [index]}]}
    return post_json(f"{stack.http_url}/v2/models/lookup/infer", body)


def is_serving(stack: RunningStack) -> bool:
    try:
        return look_up(stack).status == 200
    except OSError:
        return False


def own_metrics(stack: RunningStack) -> str:
    return call("GET", f"{stack.metrics_url}/penstock").body.decode()


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_embedded_serves_an_onnx_model_to_the_real_clients(embedded: RunningStack, module: object) -> None:
    """Triton's own clients cannot tell: metadata, readiness and an inference of a batch."""
    address = embedded.grpc_address if module is tritonclient.grpc else embedded.http_url.removeprefix("http://")
    with module.InferenceServerClient(address) as client:  # type: ignore[attr-defined]
        assert client.is_server_ready()
        assert client.is_model_ready("lookup")
        tensor = module.InferInput("index", [2, 1], "INT64")  # type: ignore[attr-defined]
        tensor.set_data_from_numpy(np.array([[3], [1]], np.int64))
        np.testing.assert_array_equal(client.infer("lookup", [tensor]).as_numpy("value"), [[30], [10]])


def test_embedded_detector_answers_pictures_as_plain_onnxruntime_does(embedded: RunningStack, shared_dir: Path) -> None:
    """Boxes within IoU 0.99 and scores within 1e-3, as through Triton."""
    reference = onnxruntime.InferenceSession(str(shared_dir / "models" / "FastestDet.onnx"))
    score_threshold, iou_threshold = thresholds(embedded)
    boxes = 0
    for picture in frames(shared_dir / "media" / "vtest.avi"):
        body = jpeg(picture)
        answer = call("POST", f"{embedded.http_url}/v2/models/fastestdet/image", body, {"content-type": "image/jpeg"})
        assert answer.status == 200, answer.body
        decoded = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR)
        (output,) = reference.run([OUTPUT], {INPUT: fastestdet_input(decoded)})
        height, width = decoded.shape[:2]
        expected = fastestdet_boxes(
            output, width=width, height=height, score_threshold=score_threshold, iou_threshold=iou_threshold
        )
        assert_same_boxes(answer.json["results"][0]["detections"], expected)
        boxes += len(expected)
    assert boxes >= 5


@pytest.mark.skipif(not (CHECKOUT / "model_repository" / "street").is_dir(), reason="street is not in this checkout")
def test_embedded_serves_street_where_there_is_no_triton(tmp_path: Path) -> None:
    """The shipped detector, by the shipped repository alone, finds what rendered scenes show."""
    render = ["-m", "deploy.models.street.render", "--scenes", "8", "--seed", "900001", "--scenario", "plain", "--out"]
    scenes = str(tmp_path / "scenes")
    subprocess.run([sys.executable, *render, scenes], check=True, cwd=CHECKOUT, capture_output=True, timeout=60)
    truth = read_annotations(tmp_path / "scenes")
    stack = start_stack(tmp_path / "home", "--engine", "embedded", environ=NO_TRITON)
    try:
        assert [line for line in stack.output if line.startswith("serving ") and "street" in line]
        found = [find(stack, tmp_path / "scenes" / name) for name in truth]
    finally:
        assert stop_stack(stack) == 0
    assert average_precision(list(truth.values()), found, class_count=3).mean > 0.7


def find(stack: RunningStack, picture: Path) -> Detections:
    """What street finds in the picture."""
    answer = call(
        "POST", f"{stack.http_url}/v2/models/street/image", picture.read_bytes(), {"content-type": "image/jpeg"}
    )
    assert answer.status == 200, answer.body
    rows = answer.json["results"][0]["detections"]
    return Detections(
        np.array([row["xyxy"] for row in rows], np.float32).reshape(-1, 4),
        np.array([row["score"] for row in rows], np.float32),
        np.array([row["class_id"] for row in rows], np.int64),
    )


def test_embedded_stack_says_which_engine_serves_and_what_it_cannot(embedded: RunningStack) -> None:
    """The last lines name the engine, and a model of another backend with the reason; there is no engine process."""
    assert f"engine: embedded (ONNX Runtime {onnxruntime.__version__} on the CPU)\n" in embedded.output
    (refused,) = [line for line in embedded.output if line.startswith("cannot serve ")]
    assert refused.startswith("cannot serve script: ")
    assert "python" in refused
    assert not embedded.logged("engine process")
    others = {" ".join(child.cmdline()[1:3]) for child in family(embedded)}
    assert others == {"-m server", "-m server.vision.worker"}


def test_embedded_lists_a_model_of_another_backend_with_its_reason(embedded: RunningStack) -> None:
    """Who asks what is served also sees what is not, and why."""
    rows = json.loads(penstock(embedded, "models", "list", "--json"))
    (script,) = [row for row in rows if row["name"] == "script"]
    assert script["state"] != "READY"
    assert "python" in script["reason"]
    assert "ONNX" in script["reason"]


def test_embedded_loads_and_unloads_by_the_command_line(embedded: RunningStack) -> None:
    """`penstock models load` and `unload` do what they do with Triton."""
    penstock(embedded, "models", "unload", "lookup")
    assert state_of(embedded, "lookup") != "READY"
    assert look_up(embedded).status in (400, 404)
    penstock(embedded, "models", "load", "lookup")
    assert state_of(embedded, "lookup") == "READY"
    assert look_up(embedded).status == 200


def test_embedded_metrics_hold_ours_and_the_engines(embedded: RunningStack) -> None:
    """One scrape has both, under Triton's names for the engine's part, and each part has its own path."""
    assert look_up(embedded).status == 200
    text = call("GET", embedded.metrics_url).body.decode()
    assert "penstock_engine_up 1.0" in text
    assert 'penstock_model_ready{model="script"} 0.0' in text
    assert 'nv_inference_request_success{model="lookup",version="1"}' in text
    assert "penstock_" not in call("GET", f"{embedded.metrics_url}/engine").body.decode()


def test_auto_without_a_triton_serves_embedded_and_says_why(tmp_path: Path) -> None:
    """One line tells what was missing, and the same models are served."""
    write_models(tmp_path / "models")
    stack = start_embedded(tmp_path, engine="auto")
    try:
        assert is_serving(stack)
        (said,) = stack.logged("info .* engine: embedded, since ")
        assert "no tritonserver on PATH and none of nvidia-pytriton in /nonexistent" in said
    finally:
        assert stop_stack(stack) == 0


def test_gateway_of_a_triton_does_not_load_onnx_runtime() -> None:
    """What only the embedded engine needs costs the others neither time nor memory."""
    program = "import sys, server.main, server.stack; raise SystemExit('onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, timeout=60, check=False).returncode == 0


def infer_slow(stack: RunningStack, trips: int, outcomes: list[int | str]) -> threading.Thread:
    """One REST request that takes about a millisecond a trip, in a thread."""

    def work() -> None:
        body = {"inputs": [{"name": "trips", "shape": [1, 1], "datatype": "INT64", "data": [trips]}]}
        try:
            outcomes.append(post_json(f"{stack.http_url}/v2/models/slow/infer", body).status)
        except OSError as error:
            outcomes.append(repr(error))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_embedded_stop_under_load_answers_all_and_leaves_nothing(tmp_path: Path) -> None:
    """What was accepted is answered over both protocols, exit code 0, and no process or port is left."""
    write_models(tmp_path / "models")
    stack = start_embedded(tmp_path)
    try:
        everyone = family(stack)
        answered: list[object] = []
        client = tritonclient.grpc.InferenceServerClient(stack.grpc_address)
        tensor = tritonclient.grpc.InferInput("trips", [1, 1], "INT64")
        tensor.set_data_from_numpy(np.array([[1500]], np.int64))
        client.async_infer("slow", [tensor], lambda result, error: answered.append(error))
        outcomes: list[int | str] = []
        threads = [infer_slow(stack, 1500, outcomes) for _ in range(3)]
        wait_for(lambda: inflight(stack) == 4, 10, "four requests in flight")
        assert stop_stack(stack, 20) == 0, "".join(stack.log)
        for thread in threads:
            thread.join()
        wait_for(lambda: answered, 5, "the gRPC answer")
        client.close()
    finally:
        stack.process.kill()
    assert outcomes == [200, 200, 200]
    assert answered == [None]
    assert not [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    for url in (stack.http_url, stack.metrics_url):
        with pytest.raises(OSError, match="refused"):
            call("GET", url)


def test_embedded_stop_before_it_is_ready_ends_well(tmp_path: Path) -> None:
    """SIGTERM while models are loaded: exit 0, no traceback, nothing left."""
    write_models(tmp_path / "models")
    stack = start_embedded(tmp_path, wait=False)
    try:
        stack.wait_for_log("listening")
        everyone = family(stack)
        assert stop_stack(stack, 15) == 0, "".join(stack.log)
    finally:
        stack.process.kill()
    assert not [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not stack.logged("Traceback")


def test_embedded_gateway_that_dies_serves_again_in_seconds(tmp_path: Path) -> None:
    """A crash of ONNX Runtime is a crash of the gateway: clients see broken connections, then answers again."""
    write_models(tmp_path / "models")
    stack = start_embedded(tmp_path)
    is_over = threading.Event()
    outcomes: list[str] = []
    clients = [threading.Thread(target=ask_until, args=(stack, is_over, outcomes)) for _ in range(2)]
    try:
        for client in clients:
            client.start()
        wait_for(lambda: outcomes.count("200") > 50, 20, "light load")
        old = gateway_of(stack)
        decoders = old.children(recursive=True)
        old.send_signal(signal.SIGSEGV)
        wait_for(lambda: "broken" in outcomes, 5, "a connection broke")
        took_s = wait_for(lambda: is_serving(stack), 15, "a new gateway serves")
        assert took_s < 10
        assert gateway_of(stack).pid != old.pid
        wait_for(lambda: not any(child.is_running() for child in decoders), 5, "old decoders are gone")
        assert "penstock_gateway_restarts_total 1.0" in own_metrics(stack)
        assert "penstock_engine_restarts_total 0.0" in own_metrics(stack)
    finally:
        is_over.set()
        for client in clients:
            client.join()
        assert stop_stack(stack) == 0
    assert set(outcomes) <= {"200", "503", "broken"}


def ask_until(stack: RunningStack, is_over: threading.Event, outcomes: list[str]) -> None:
    """One client that asks the table for a row again and again."""
    while not is_over.wait(0.005):
        try:
            outcomes.append(str(look_up(stack).status))
        except (OSError, http.client.HTTPException):
            outcomes.append("broken")


def test_embedded_parent_killed_takes_everything_with_it(tmp_path: Path) -> None:
    """kill -9 of `penstock up` leaves no process; the next start clears the rest away."""
    write_models(tmp_path / "models")
    stack = start_embedded(tmp_path, TMPDIR=str(tmp_path))
    everyone = family(stack)
    stack.process.kill()
    stack.process.wait()
    wait_for(lambda: not any(child.is_running() for child in everyone), 15, "every process is gone")
    runs = tmp_path / f"penstock-{os.getuid()}"
    (left,) = runs.glob("run-*")
    following = start_embedded(tmp_path, TMPDIR=str(tmp_path))
    assert not left.exists()
    assert stop_stack(following) == 0
    assert not list(runs.glob("run-*"))


@pytest.mark.parametrize("how", ["stopped", "parent killed"])
def test_embedded_run_that_cannot_be_ended_holds_up_nobody(tmp_path: Path, how: str) -> None:
    """One node of minutes on a model's only instance: 504 in time, the others serve, and the stack still ends soon."""
    write_models(tmp_path / "models")
    onnx_models.save(onnx_models.one_long_node(), tmp_path / "models", "long", config=LONG_CONFIG)
    stack = start_embedded(tmp_path, "--grace-s", "1")
    everyone = family(stack)
    try:
        for _ in range(2):
            assert ask_long(stack, 1_000_000).status == 504
        assert look_up(stack).status == 200
        assert inflight(stack) == 0
        assert call("POST", f"{stack.http_url}/v2/repository/models/long/unload").status == 200
        if how == "stopped":
            assert stop_stack(stack, 15) == 0
            assert not stack.logged("killed"), "".join(stack.log)
        else:
            stack.process.kill()
            stack.process.wait()
        wait_for(lambda: not any(child.is_running() for child in everyone), 10, "every process is gone")
    finally:
        stack.process.kill()
        for child in everyone:
            if child.is_running():
                child.kill()


def ask_long(stack: RunningStack, n: int) -> Answer:
    body = {"inputs": [{"name": "n", "shape": [1], "datatype": "INT64", "data": [n]}]}
    text = json.dumps(body).encode()
    return call("POST", f"{stack.http_url}/v2/models/long/infer", text, {"x-request-timeout-ms": "300"})


def shifted_lookup() -> onnx.ModelProto:
    """lookup, but every index misses the table by far: each run fails."""
    far = numpy_helper.from_array(np.array([1000], np.int64), "far")
    table = numpy_helper.from_array(onnx_models.TABLE, "table")
    nodes = [helper.make_node("Add", ["index", "far"], ["shifted"])]
    nodes.append(helper.make_node("Gather", ["table", "shifted"], ["value"]))
    tensor = helper.make_tensor_value_info
    inputs, outputs = [tensor("index", TensorProto.INT64, ["N", 1])], [tensor("value", TensorProto.FLOAT, ["N", 1])]
    graph = helper.make_graph(nodes, "shifted", inputs, outputs, [far, table])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_embedded_engine_that_cannot_infer_is_restarted_with_its_gateway(tmp_path: Path) -> None:
    """Canaries that fail in a row: a bounded drain that answers what it cuts, a new process, counted and logged."""
    write_models(tmp_path / "models")
    path = tmp_path / "models" / "lookup" / "1" / "model.onnx"
    good = path.read_bytes()
    stack = start_embedded(tmp_path, "--grace-s", "1", PENSTOCK_CANARY_INTERVAL_S="0.2")
    try:
        old = gateway_of(stack).pid
        outcomes: list[int | str] = []
        waiting = infer_slow(stack, 1_000_000, outcomes)
        wait_for(lambda: inflight(stack) == 1, 10, "one request in flight")
        onnx.save(shifted_lookup(), path)
        assert call("POST", f"{stack.http_url}/v2/repository/models/lookup/load", b"{}").status == 200
        stack.wait_for_log("embedded engine is sick; .*3 canary inferences in a row failed, the last on 'lookup'")
        path.write_bytes(good)
        waiting.join(15)
        assert outcomes == [503]
        wait_for(lambda: not psutil.pid_exists(old), 15, "the old gateway is gone")
        wait_for(lambda: is_serving(stack), 20, "a new gateway serves")
        assert "penstock_engine_restarts_total 1.0" in own_metrics(stack)
        assert "penstock_gateway_restarts_total 0.0" in own_metrics(stack)
    finally:
        assert stop_stack(stack) == 0
