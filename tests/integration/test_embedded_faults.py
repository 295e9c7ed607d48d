"""The embedded engine's stack when it is stopped, killed, wedged or sick: what is answered, what is left."""

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper, numpy_helper

from tests.engines import onnx_models
from tests.integration.embedded_stack import infer_slow, is_serving, look_up, own_metrics, start_embedded, write_models
from tests.integration.living import family, gateway_of, inflight
from tests.support.http import Answer, call
from tests.support.stack import RunningStack, stop_stack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("embedded")

LONG_CONFIG = """backend: "onnxruntime"
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "canary" value { string_value: "off" } }
"""

TRIPS = 1000  # about a second of the model `slow`
SEED, SHARE_WELL = 229.0, 0.25  # ONNX Runtime's first six draws of this seed are below the share, the next three above


@dataclass
class Place:
    """A stack that the tests kill parts of; a new one where the last was stopped or killed as a whole."""

    folder: Path
    stack: RunningStack | None = None

    def serving(self) -> RunningStack:
        """The stack, started where there is none."""
        if self.stack is None:
            self.stack = start_embedded(self.folder, TMPDIR=str(self.folder))
        return self.stack

    def runs(self) -> list[Path]:
        """The run directories of this place's stacks."""
        return list((self.folder / f"penstock-{os.getuid()}").glob("run-*"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Three models: a quick one, a slow one, and one of a single node that takes minutes."""
    place = Place(tmp_path_factory.mktemp("faults"))
    write_models(place.folder / "models")
    onnx_models.save(onnx_models.one_long_node(), place.folder / "models", "long", config=LONG_CONFIG)
    yield place
    if place.stack is not None:
        assert stop_stack(place.stack) == 0, "".join(place.stack.log[-30:])


def test_embedded_stop_under_load_answers_all_and_leaves_nothing(place: Place) -> None:
    """What was accepted is answered over both protocols, exit code 0, and no process or port is left.

    A node of minutes, whose callers got their 504, does not hold up the end.
    """
    stack = place.serving()
    try:
        everyone = family(stack)
        run_the_long_node(stack)
        answered: list[object] = []
        client = tritonclient.grpc.InferenceServerClient(stack.grpc_address)
        tensor = tritonclient.grpc.InferInput("trips", [1, 1], "INT64")
        tensor.set_data_from_numpy(np.array([[TRIPS]], np.int64))
        client.async_infer("slow", [tensor], lambda result, error: answered.append(error))
        outcomes: list[int | str] = []
        threads = [infer_slow(stack, TRIPS, outcomes) for _ in range(3)]
        wait_for(lambda: inflight(stack) == 4, 10, "four requests in flight")
        assert stop_stack(stack, 20) == 0, "".join(stack.log)
        for thread in threads:
            thread.join()
        wait_for(lambda: answered, 5, "the gRPC answer")
        client.close()
    finally:
        stack.process.kill()
        place.stack = None
    assert outcomes == [200, 200, 200]
    assert answered == [None]
    assert not stack.logged("killed"), "".join(stack.log)
    assert not place.runs()
    assert not [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    for url in (stack.http_url, stack.metrics_url):
        with pytest.raises(OSError, match="refused"):
            call("GET", url)


@pytest.mark.long
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


def test_embedded_gateway_that_dies_serves_again_in_seconds(place: Place) -> None:
    """A crash of ONNX Runtime is a crash of the gateway: clients see broken connections, then answers again."""
    stack = place.serving()
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
        wait_for(lambda: is_serving(stack), 10, "a new gateway serves")  # 4 s on an idle machine
        assert gateway_of(stack).pid != old.pid
        wait_for(lambda: not any(child.is_running() for child in decoders), 5, "old decoders are gone")
        assert "penstock_gateway_restarts_total 1.0" in own_metrics(stack)
        assert "penstock_engine_restarts_total 0.0" in own_metrics(stack)
    finally:
        is_over.set()
        for client in clients:
            client.join()
    assert set(outcomes) <= {"200", "503", "broken"}


def ask_until(stack: RunningStack, is_over: threading.Event, outcomes: list[str]) -> None:
    """One client that asks the table for a row again and again."""
    while not is_over.wait(0.005):
        try:
            outcomes.append(str(look_up(stack).status))
        except (OSError, http.client.HTTPException):
            outcomes.append("broken")


def test_embedded_parent_killed_takes_everything_with_it(place: Place) -> None:
    """One node of minutes on a model's only instance: 504 in time, and the others serve.

    kill -9 of `penstock up` leaves no process; the next start clears the rest away.
    """
    stack = place.serving()
    everyone = family(stack)
    run_the_long_node(stack)
    stack.process.kill()
    stack.process.wait()
    place.stack = None
    wait_for(lambda: not any(child.is_running() for child in everyone), 15, "every process is gone")
    (left,) = place.runs()
    place.serving()
    assert not left.exists()
    assert len(place.runs()) == 1


def run_the_long_node(stack: RunningStack) -> None:
    """It runs on after its callers got their 504."""
    assert call("POST", f"{stack.http_url}/v2/repository/models/long/load").status == 200
    for _ in range(2):
        assert ask_long(stack, 1_000_000).status == 504
    assert look_up(stack).status == 200
    assert inflight(stack) == 0
    assert call("POST", f"{stack.http_url}/v2/repository/models/long/unload").status == 200


def ask_long(stack: RunningStack, n: int) -> Answer:
    body = {"inputs": [{"name": "n", "shape": [1], "datatype": "INT64", "data": [n]}]}
    text = json.dumps(body).encode()
    return call("POST", f"{stack.http_url}/v2/models/long/infer", text, {"x-request-timeout-ms": "300"})


def failing_lookup() -> onnx.ModelProto:
    """Like lookup, but most runs miss the table: the first six with this seed succeed, later ones mostly fail."""
    draw = helper.make_node("RandomUniform", [], ["draw"], shape=[1, 1], low=0.0, high=1.0, seed=SEED)
    limit = numpy_helper.from_array(np.array([[SHARE_WELL]], np.float32), "limit")
    far = numpy_helper.from_array(np.array([[1000]], np.int64), "far")
    table = numpy_helper.from_array(onnx_models.TABLE, "table")
    nodes = [
        draw,
        helper.make_node("Greater", ["draw", "limit"], ["misses"]),
        helper.make_node("Cast", ["misses"], ["one"], to=TensorProto.INT64),
        helper.make_node("Mul", ["one", "far"], ["distance"]),
        helper.make_node("Add", ["index", "distance"], ["shifted"]),
        helper.make_node("Gather", ["table", "shifted"], ["value"]),
    ]
    tensor = helper.make_tensor_value_info
    inputs, outputs = [tensor("index", TensorProto.INT64, ["N", 1])], [tensor("value", TensorProto.FLOAT, ["N", 1])]
    graph = helper.make_graph(nodes, "failing", inputs, outputs, [limit, far, table])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_embedded_engine_that_cannot_infer_is_restarted_with_its_gateway(tmp_path: Path) -> None:
    """If no model can serve, the gateway drains for a limited time and is replaced; this is counted and logged."""
    write_models(tmp_path / "models")
    path = tmp_path / "models" / "lookup" / "1" / "model.onnx"
    good = path.read_bytes()
    onnx.save(failing_lookup(), path)
    (tmp_path / "models" / "slow" / "config.pbtxt").write_text(LONG_CONFIG)
    stack = start_embedded(tmp_path, "--grace-s", "1", PENSTOCK_CANARY_INTERVAL_S="0.2")
    try:
        old = gateway_of(stack).pid
        outcomes: list[int | str] = []
        stack.wait_for_log("canary inference failed model=lookup")
        waiting = infer_slow(stack, 1_000_000, outcomes)
        wait_for(lambda: inflight(stack) == 1, 10, "one request in flight")
        stack.wait_for_log("embedded engine is sick; .*model 'lookup': 3 canary inferences in a row failed")
        path.write_bytes(good)
        waiting.join(15)
        assert outcomes == [503]
        wait_for(lambda: not psutil.pid_exists(old), 15, "the old gateway is gone")
        wait_for(lambda: is_serving(stack), 20, "a new gateway serves")
        assert "penstock_engine_restarts_total 1.0" in own_metrics(stack)
        assert "penstock_gateway_restarts_total 0.0" in own_metrics(stack)
    finally:
        assert stop_stack(stack) == 0
