"""The stack ends as it promises: what was accepted is answered, and nothing is left."""

import http.client
import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.integration.living import SLOW_CONFIG, SharedMemory, family, infer_slow, inflight, is_serving, running
from tests.support.http import call
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import write_model
from tests.support.waiting import wait_for


def _sleeping(ms: float) -> tritonclient.grpc.InferInput:
    tensor = tritonclient.grpc.InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.array([ms], np.float32))
    return tensor


COUNTED = '''"""Writes down each request that it executes."""
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            with open({ledger!r}, "a") as ledger:
                ledger.write("1")
            time.sleep(0.02)
            array = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]))
        return answers
'''


def test_stop_under_steady_load_answers_everything_it_executed_and_leaves_nothing(
    tmp_path: Path, repository: Path
) -> None:
    """Clients that never pause see 200 for each request that was executed, until SIGTERM has closed the port.

    Ready is 503 at once, and until the delay is over requests are served; a gRPC call that takes longer is answered.
    A connection that the kernel took and the gateway did not is reset with the port, as a refused one. The exit code
    is 0, and no process, port, socket or shared memory is left.
    """
    ledger = tmp_path / "executed"
    write_model(repository, "counted", COUNTED.format(ledger=str(ledger)), SLOW_CONFIG)
    no_canaries = {"PENSTOCK_CANARY_INTERVAL_S": "600"}  # but the one at the start
    arguments = ("--model-repository", str(repository), "--drain-delay-s", "1.5")
    stack = start_stack(tmp_path / "home", *arguments, environ=no_canaries)
    try:
        memory, everyone, already = SharedMemory(stack), family(stack), len(ledger.read_text())
        outcomes: list[str] = []
        threads = [threading.Thread(target=_load_until_refused, args=(stack, outcomes)) for _ in range(4)]
        with tritonclient.grpc.InferenceServerClient(stack.grpc_address) as client:
            answered: list[object] = []
            client.async_infer("slow", [_sleeping(3000)], lambda result, error: answered.append(error))
            wait_for(lambda: inflight(stack) == 1, 10, "the gRPC call runs")
            for thread in threads:
                thread.start()
            wait_for(lambda: len(outcomes) > 50, 20, "load runs")
            stack.process.send_signal(signal.SIGTERM)
            wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 503, 1, "ready is 503")
            assert is_serving(stack)
            assert call("GET", f"{stack.http_url}/v2/health/live").status == 200
            assert stack.process.wait(20) == 0, "".join(stack.log)
            wait_for(lambda: answered, 5, "the gRPC answer")
    finally:
        stack.process.kill()  # takes everything with it, where the test failed
    for thread in threads:
        thread.join(10)
    counts = {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
    assert set(counts) <= {"200", "refused", "reset at its first request"}, counts
    assert counts["refused"] == len(threads)
    assert counts["200"] == len(ledger.read_text()) - already
    assert answered == [None]
    assert not [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not memory.regions()
    for url in (stack.http_url, stack.metrics_url):
        with pytest.raises(OSError, match="refused"):
            call("GET", url)
    assert not Path(stack.engine_http_url.removeprefix("unix://")).exists()


def _load_until_refused(stack: RunningStack, outcomes: list[str]) -> None:
    """One keep-alive client, reconnecting when the server asks it to close."""
    body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [20]}]})
    connection = http.client.HTTPConnection(stack.http_url.removeprefix("http://"), timeout=10)
    while True:
        is_first = connection.sock is None
        try:
            connection.request("POST", "/v2/models/counted/infer", body)
            response = connection.getresponse()
            response.read()
            outcomes.append(str(response.status))
        except ConnectionRefusedError:
            outcomes.append("refused")
            return
        except (ConnectionResetError, BrokenPipeError) as error:  # before or between the two writes of a request
            outcomes.append("reset at its first request" if is_first else repr(error))
            connection.close()
        except OSError as error:
            outcomes.append(repr(error))
            connection.close()


def test_grace_exceeded_answers_what_it_cuts_and_exits_with_an_error_code(tmp_path: Path, repository: Path) -> None:
    """Work that outlasts the grace fails with that reason over both protocols, in time, and the exit code shows it."""
    with running(tmp_path, repository, "--grace-s", "1") as stack:
        memory = SharedMemory(stack)
        results: list[int | str] = []
        thread = infer_slow(stack, 8000, results)
        cut: list[object] = []
        with tritonclient.grpc.InferenceServerClient(stack.grpc_address) as client:
            client.async_infer("slow", [_sleeping(8000)], lambda result, error: cut.append(error))
            wait_for(lambda: inflight(stack) == 2, 10, "two requests in flight")
            stack.process.terminate()
            assert stack.process.wait(10) == 1, "".join(stack.log)
            thread.join()
            wait_for(lambda: cut, 5, "the gRPC answer")
    assert results == [503]
    assert isinstance(cut[0], InferenceServerException)
    assert cut[0].status() == "StatusCode.UNAVAILABLE"
    wait_for(lambda: not memory.regions(), 5, "shared memory is clean")


@pytest.mark.parametrize("moment", ["engine process", "loading: sleeper"])
def test_stop_before_the_stack_is_ready_ends_well(tmp_path: Path, repository: Path, moment: str) -> None:
    """SIGTERM while the gateway imports, while models load: exit 0, and nothing is left."""
    write_model(repository, "sleeper", "import time\n\ntime.sleep(60)\n", SLOW_CONFIG)
    stack = start_stack(
        tmp_path / "home", "--model-repository", str(repository), environ={"TMPDIR": str(tmp_path)}, wait=False
    )
    try:
        stack.wait_for_log(moment)
        everyone = family(stack)
        assert stop_stack(stack, 15) == 0, "".join(stack.log)
    finally:
        stack.process.kill()  # takes everything with it, where the test failed
    assert not [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not list((tmp_path / f"penstock-{os.getuid()}").glob("run-*"))
    assert not any("Traceback" in line for line in stack.log)


def test_second_signal_ends_at_once_with_an_error_code(tmp_path: Path, repository: Path) -> None:
    """Who says stop twice does not wait for slow requests; the exit code tells that work was cut."""
    with running(tmp_path, repository) as stack:
        memory = SharedMemory(stack)
        results: list[int | str] = []
        thread = infer_slow(stack, 8000, results)
        wait_for(lambda: inflight(stack) == 1, 10, "one request in flight")
        stack.process.terminate()
        stack.wait_for_log("draining")
        stack.process.terminate()
        assert stack.process.wait(5) != 0
        thread.join()
    assert results != [200]
    wait_for(lambda: not memory.regions(), 5, "shared memory is clean")
