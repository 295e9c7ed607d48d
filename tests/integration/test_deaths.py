"""A process dies or hangs, or a client disconnects: the others go on, and service returns by itself."""

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.embedded_stack import own_metrics
from tests.integration.living import (
    SLOW_CONFIG,
    SharedMemory,
    family,
    gateway_of,
    infer_slow,
    inflight,
    is_serving,
    triton_of,
    write_quick_models,
)
from tests.support.http import call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import write_model
from tests.support.waiting import SLACK, wait_for

SICK = '''"""Answers until a file appears; then every inference fails, as after a sticky CUDA error."""
import http.client
import json
import os

import triton_python_backend_utils as pb_utils

FLAG = {flag!r}


class TritonPythonModel:
    def execute(self, requests):
        if os.path.exists(FLAG):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
'''


@dataclass
class Place:
    """A stack that the tests kill parts of; a new one where the last was killed as a whole."""

    folder: Path
    repository: Path
    stack: RunningStack | None = None

    def serving(self) -> RunningStack:
        """The stack, started where there is none."""
        if self.stack is None:
            words = ("--model-repository", str(self.repository), "--models", "identity,slow")
            self.stack = start_stack(self.folder / "home", *words, environ={"TMPDIR": str(self.folder)})
        return self.stack

    def runs(self) -> list[Path]:
        """The run directories of this place's stacks."""
        return list((self.folder / f"penstock-{os.getuid()}").glob("run-*"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[Place]:
    """In the end the stack stops in order, and leaves neither memory nor a run directory."""
    folder = tmp_path_factory.mktemp("deaths")
    place = Place(folder, write_quick_models(folder / "models"))
    yield place
    stack = place.serving()
    memory = SharedMemory(stack)
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])
    assert not memory.regions()
    assert not place.runs()


@pytest.fixture
def stack(place: Place) -> RunningStack:
    return place.serving()


def number(stack: RunningStack, name: str) -> float:
    """One of the gateway's metrics; 0 where it was never counted."""
    found = re.search(rf"^penstock_{re.escape(name)} (\S+)$", own_metrics(stack), re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_triton_killed_is_503_within_a_second_and_back_by_itself(stack: RunningStack) -> None:
    """kill -9 of tritonserver: running, waiting and new requests fail fast, nothing hangs, and service returns."""
    restarts, results = number(stack, "engine_restarts_total"), list[int | str]()
    threads = [infer_slow(stack, 8000, results) for _ in range(6)]  # two instances: two run, four wait
    wait_for(lambda: inflight(stack) == 6, 10, "six requests in flight")
    killed = time.monotonic()
    triton_of(stack).kill()
    for thread in threads:
        thread.join(20)
    assert results == [503] * 6
    assert time.monotonic() - killed < 1.0 * SLACK
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    answer = post_json(f"{stack.http_url}/v2/models/identity/infer", body)
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert call("GET", f"{stack.http_url}/v2/health/live").status == 200
    wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 503, 1, "ready is 503")
    assert call("GET", f"{stack.http_url}/v2/health/ready").json["reason"]
    wait_for(lambda: is_serving(stack), 30, "the engine is back")
    assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200
    assert number(stack, "engine_restarts_total") == restarts + 1
    assert inflight(stack) == 0


def test_gateway_killed_is_replaced_and_triton_stays(stack: RunningStack) -> None:
    """kill -9 of the gateway: a new one serves on the same ports in seconds, with the same Triton.

    A client that left before, while the engine worked, left nothing in flight and no error line.
    """
    restarts = number(stack, "gateway_restarts_total")
    leave_in_the_middle(stack)
    engine = triton_of(stack).pid
    old = gateway_of(stack)
    decoders = old.children(recursive=True)
    assert decoders
    old.kill()
    wait_for(lambda: is_serving(stack), 15, "a new gateway serves")
    assert triton_of(stack).pid == engine
    assert gateway_of(stack).pid != old.pid
    wait_for(lambda: not any(child.is_running() for child in decoders), 5, "old decoders are gone")
    assert number(stack, "gateway_restarts_total") == restarts + 1


def test_parent_killed_takes_everything_with_it(place: Place, stack: RunningStack) -> None:
    """kill -9 of `penstock up` itself leaves neither a gateway nor a Triton behind; the next start clears the rest."""
    memory, everyone = SharedMemory(stack), family(stack)
    stack.process.kill()
    stack.process.wait()
    place.stack = None
    wait_for(lambda: not any(child.is_running() for child in everyone), 15, "every process is gone")
    (left,) = place.runs()
    place.serving()
    assert not left.exists()
    assert not memory.regions()
    assert len(place.runs()) == 1


def test_hung_triton_is_503_and_serves_after_it_wakes(stack: RunningStack) -> None:
    """SIGSTOP of tritonserver: ready turns 503, waiting requests end, new ones are refused; SIGCONT: service."""
    triton = triton_of(stack)
    results: list[int | str] = []
    thread = infer_slow(stack, 3000, results)
    wait_for(lambda: inflight(stack) == 1, 10, "one request in flight")
    triton.suspend()
    try:
        wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 503, 15, "ready is 503")
        assert not is_serving(stack)
        thread.join(15)
        assert results == [503]
    finally:
        triton.resume()
    wait_for(lambda: is_serving(stack), 30, "service is back")


@pytest.mark.long
def test_engine_that_lives_but_cannot_infer_is_restarted(tmp_path: Path, triton_environment: Path) -> None:
    """Triton says live while every inference fails: ready turns 503, Triton is restarted, and service returns."""
    flag, repository = tmp_path / "sick", tmp_path / "models"
    write_model(repository, "identity", SICK.format(flag=str(flag)), SLOW_CONFIG)
    environ = {"PENSTOCK_CANARY_INTERVAL_S": "0.2"}
    stack = start_stack(tmp_path / "home", "--model-repository", str(repository), environ=environ)
    try:
        old = triton_of(stack).pid
        flag.touch()
        wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 503, 10, "ready is 503")
        stack.wait_for_log("3 canary inferences in a row failed, the last: model 'identity'.*illegal memory access")
        wait_for(lambda: not psutil.pid_exists(old), 20, "the old Triton is gone")
        flag.unlink()
        wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 200, 40, "ready again")
        text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
        assert "penstock_engine_restarts_total 0.0" not in text
    finally:
        assert stop_stack(stack) == 0


def leave_in_the_middle(stack: RunningStack) -> None:
    """A disconnect while the engine works: nothing in flight at once, counted as cancelled, no error logged."""
    cancelled, errors = number(stack, 'cancelled_total{protocol="http"}'), len(stack.logged("Z error "))
    body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [4000]}]})
    address = stack.http_url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as client:
        head = f"POST /v2/models/slow/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        client.sendall(head.encode())
        wait_for(lambda: inflight(stack) == 1, 5, "one request in flight")
    wait_for(lambda: inflight(stack) == 0, 2, "nothing in flight")
    assert number(stack, 'cancelled_total{protocol="http"}') == cancelled + 1
    assert len(stack.logged("Z error ")) == errors
