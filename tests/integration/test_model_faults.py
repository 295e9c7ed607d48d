"""One model of a real Triton hangs or fails; other models are not affected."""

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import CONFIG, IDENTITY, write_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("model_faults")

ACTOR = '''"""Answers its input; -1 waits, -2 stops the process, -3 is slow. While a file is there, it fails."""
import os
import subprocess
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.act(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def act(self, x):
        if os.path.exists({fails!r}):
            raise RuntimeError("worn out")
        if x.ravel()[0] == -1:
            time.sleep(100000)
        if x.ravel()[0] == -3:
            time.sleep({slow_s})
        if x.ravel()[0] == -2:
            subprocess.Popen(["sh", "-c", f"sleep {pause_s}; kill -CONT {{os.getpid()}}"])
            os.kill(os.getpid(), 19)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
'''
SLOW_S = 0.5
LONG_CALLS = 60  # of SLOW_S each: half a minute together, several execution time-outs
PAUSE_S = 3  # Triton gives up a process that is stopped for a second
ENVIRON = {"PENSTOCK_CANARY_INTERVAL_S": "0.5", "PENSTOCK_EXECUTION_TIMEOUT_S": "4"}


@pytest.fixture(scope="module")
def fails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the model `failing` fails."""
    return tmp_path_factory.mktemp("switch") / "on"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path, fails: Path) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("model-faults")
    config = CONFIG.format(max_batch_size=0, data_type="TYPE_FP32", count=1)
    write_model(folder / "models", "failing", ACTOR.format(fails=str(fails), pause_s=PAUSE_S, slow_s=SLOW_S), config)
    for name in ("actor", "endless", "stopped", "left-http", "left-grpc", "left-stream"):
        write_model(folder / "models", name, ACTOR.format(fails="/nowhere", pause_s=PAUSE_S, slow_s=SLOW_S), config)
    write_model(folder / "models", "fine", IDENTITY, config)
    running = start_stack(folder / "home", "--model-repository", str(folder / "models"), environ=ENVIRON)
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


def ask(stack: RunningStack, model: str, value: float = 1.0, timeout_ms: int = 2000) -> Answer:
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [value]}]}
    headers = {"x-request-timeout-ms": str(timeout_ms)}
    return post_json(f"{stack.http_url}/v2/models/{model}/infer", body, **headers)


def status(stack: RunningStack, path: str) -> int:
    return call("GET", f"{stack.http_url}/v2/{path}").status


@contextmanager
def others_served(stack: RunningStack) -> Iterator[None]:
    """Within the block the other model answers every call, stays ready, and the engine is not restarted."""
    end, outcomes = threading.Event(), list[int]()

    def keep_asking() -> None:
        while not end.wait(0.05):
            outcomes.append(ask(stack, "fine", timeout_ms=20_000).status)
            outcomes.append(status(stack, "health/ready"))

    thread = threading.Thread(target=keep_asking)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(30)
    assert outcomes
    assert set(outcomes) == {200}
    page = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    assert "penstock_engine_restarts_total 0.0" in page


def in_flight(stack: RunningStack) -> float:
    page = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return sum(float(value) for value in re.findall(r"^penstock_inflight_requests(?:{.*})? (\S+)$", page, re.MULTILINE))


def slow_request(model: str) -> service_pb2.ModelInferRequest:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1])
    tensor.contents.fp32_contents.append(-3.0)
    return service_pb2.ModelInferRequest(model_name=model, inputs=[tensor])


@contextmanager
def long_calls(stack: RunningStack, way: str) -> Iterator[None]:
    """LONG_CALLS to the model "left-WAY", from a client that disconnects at the end of the block."""
    model = f"left-{way}"
    if way == "http":
        body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [-3]}]})
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        url = urlsplit(stack.http_url)
        with ExitStack() as sockets:
            for _ in range(LONG_CALLS):
                opened = sockets.enter_context(socket.create_connection((str(url.hostname), url.port or 0)))
                opened.sendall((head + body).encode())
            yield
        return
    with grpc.insecure_channel(stack.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        if way == "grpc":
            calls = [stub.ModelInfer.future(slow_request(model)) for _ in range(LONG_CALLS)]
        else:
            calls = [stub.ModelStreamInfer(iter([slow_request(model)] * 4)) for _ in range(LONG_CALLS // 4)]
        yield
        for one in calls:
            one.cancel()


def index_row(stack: RunningStack, model: str) -> dict[str, str]:
    rows: list[dict[str, str]] = post_json(f"{stack.http_url}/v2/repository/index", {}).json
    return next(row for row in rows if row["name"] == model)


def test_model_that_hangs_is_unavailable_alone_and_served_again_by_new_processes(stack: RunningStack) -> None:
    """Its process is killed and the model reloaded; no call of another model fails."""
    wait_for(lambda: ask(stack, "actor").status == 200, 60, "the model serves")
    with others_served(stack):
        assert ask(stack, "actor", -1.0).status in (500, 504)
        wait_for(lambda: status(stack, "models/actor/ready") == 503, 60, "the model that hangs is not ready")
        wait_for(lambda: ask(stack, "actor").status == 200, 60, "the model serves again")
        wait_for(lambda: status(stack, "models/actor/ready") == 200, 10, "the model is ready again")
    stack.wait_for_log("model is unavailable")
    stack.wait_for_log("model is available again")


def test_call_without_an_early_deadline_to_a_model_that_hangs_is_503(stack: RunningStack) -> None:
    """It ends with the reason and Retry-After when the model's process is killed; Triton's own answer is a 500."""
    wait_for(lambda: ask(stack, "endless").status == 200, 60, "the model serves")
    answer = ask(stack, "endless", -1.0, 60_000)
    assert (answer.status, "retry-after" in answer.headers) == (503, True)
    assert "it answered nothing for 4 s" in answer.json["error"]
    wait_for(lambda: ask(stack, "endless").status == 200, 60, "the model serves again")


def test_process_that_is_stopped_under_calls_and_goes_on_does_not_end_triton(stack: RunningStack) -> None:
    """It is replaced before it can continue, and each call gets its own answer or an error."""
    wait_for(lambda: ask(stack, "stopped").status == 200, 60, "the model serves")
    answers: dict[float, Answer] = {}
    with others_served(stack):
        calls = [
            threading.Thread(target=lambda value=value: answers.update({value: ask(stack, "stopped", value, 20_000)}))
            for value in (-2.0, 1.0, 2.0, 3.0, 4.0, 5.0)
        ]
        for one in calls:
            one.start()
        for one in calls:
            one.join()
        stack.wait_for_log("killed stopped model processes")
        wait_for(lambda: ask(stack, "stopped").status == 200, 60, "the model serves again")
    wrong = {value: answer.json for value, answer in answers.items() if answer.status == 200}
    assert all(answer["outputs"][0]["data"] == [value] for value, answer in wrong.items()), wrong


def test_model_that_fails_is_unavailable_alone_until_it_works(stack: RunningStack, fails: Path) -> None:
    """It gets 503 with Retry-After; the reason is in the index; gRPC and metrics agree."""
    wait_for(lambda: ask(stack, "failing").status == 200, 60, "the model serves")
    with others_served(stack):
        fails.touch()
        try:
            wait_for(lambda: ask(stack, "failing").status == 503, 60, "the failing model is refused")
            answer = ask(stack, "failing")
            assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (503, True)
            assert "canary inferences in a row failed, the last: model 'failing' failed: " in answer.json["error"]
            row = index_row(stack, "failing")
            assert (row["state"], "worn out" in row["reason"]) == ("UNAVAILABLE", True)
            client = tritonclient.grpc.InferenceServerClient(stack.grpc_address)
            assert not client.is_model_ready("failing")
            assert client.is_model_ready("fine")
            assert client.is_server_ready()
            client.close()
            page = call("GET", f"{stack.metrics_url}/penstock").body.decode()
            assert 'penstock_model_unavailable{cause="canary",model="failing"} 1.0' in page
        finally:
            os.unlink(fails)
        wait_for(lambda: ask(stack, "failing").status == 200, 90, "the model serves again")


@pytest.mark.parametrize("way", ["http", "grpc", "stream"])
def test_long_calls_of_a_client_that_left_neither_delay_others_nor_make_the_model_hang(
    stack: RunningStack, way: str
) -> None:
    """Triton also executes abandoned calls in order, so it gets only a few calls; the others wait for their turn."""
    model = f"left-{way}"
    wait_for(lambda: ask(stack, model).status == 200, 60, "the model serves")
    for _ in range(2):  # abandoned calls count until they are finished, so a second attempt does not help
        with long_calls(stack, way):
            wait_for(lambda: in_flight(stack) >= LONG_CALLS // 4, 60, "the calls have come")
        assert ask(stack, model, timeout_ms=15_000).status == 200
    assert not stack.logged(f"model is unavailable.*{model}")
