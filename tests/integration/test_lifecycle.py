"""The stack starts, dies, comes back and ends as it promises. Each test runs a stack of its own."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc

from tests.conftest import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.integration.web import call, post_json
from tests.tiny_models import CONFIG, IDENTITY, SLOW, write_model

pytestmark = pytest.mark.xdist_group("lifecycle")
SLOW_CONFIG = CONFIG.format(max_batch_size=0, data_type="TYPE_FP32", count=2)


@pytest.fixture
def repository(tmp_path: Path, triton_environment: Path) -> Path:
    """One identity and one sleeper, quick to load."""
    folder = tmp_path / "models"
    write_model(folder, "identity", IDENTITY, CONFIG.format(max_batch_size=8, data_type="TYPE_FP32", count=1))
    write_model(folder, "slow", SLOW, SLOW_CONFIG)
    return folder


@contextmanager
def running(tmp_path: Path, repository: Path, *arguments: str) -> Iterator[RunningStack]:
    """A stack that is gone afterwards, whatever the test did to it."""
    stack = start_stack(tmp_path / "home", "--model-repository", str(repository), *arguments)
    try:
        yield stack
    finally:
        if stack.process.poll() is None:
            stop_stack(stack)


class SharedMemory:
    """The regions of one stack's engine, told from those of any other Triton on this machine."""

    def __init__(self, stack: RunningStack) -> None:
        self._prefix = f"penstock_{triton_of(stack).environ()['PENSTOCK_ENGINE_ID']}"
        assert self.regions(), "the models of a running engine have regions"

    def regions(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.startswith(self._prefix)]


def family(stack: RunningStack) -> list[psutil.Process]:
    return psutil.Process(stack.process.pid).children(recursive=True)


def triton_of(stack: RunningStack) -> psutil.Process:
    return next(child for child in family(stack) if child.name().startswith("tritonserver"))


def gateway_of(stack: RunningStack) -> psutil.Process:
    return next(
        child
        for child in family(stack)
        if child.cmdline()[1:3] == ["-m", "server"] and child.ppid() == stack.process.pid
    )


def infer_slow(stack: RunningStack, ms: float, results: list[int | str]) -> threading.Thread:
    """One REST request that takes so long, in a thread; its status goes to the list."""

    def work() -> None:
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [ms]}]}
        try:
            results.append(post_json(f"{stack.http_url}/v2/models/slow/infer", body).status)
        except OSError as error:
            results.append(repr(error))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def wait_for(condition: object, timeout_s: float, what: str) -> float:
    """Seconds until the condition held."""
    assert callable(condition)
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if condition():
            return time.monotonic() - started
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def is_serving(stack: RunningStack) -> bool:
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    try:
        return post_json(f"{stack.http_url}/v2/models/identity/infer", body).status == 200
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_under_load_answers_all_and_leaves_nothing(
    tmp_path: Path, repository: Path, number: signal.Signals
) -> None:
    """Requests that were accepted are answered, exit code 0, and no process, port or shared memory is left."""
    with running(tmp_path, repository) as stack:
        memory = SharedMemory(stack)
        everyone = family(stack)
        grpc_client = tritonclient.grpc.InferenceServerClient(stack.grpc_address)
        tensor = tritonclient.grpc.InferInput("x", [1], "FP32")
        tensor.set_data_from_numpy(np.array([700], np.float32))
        answered: list[object] = []
        grpc_client.async_infer("slow", [tensor], lambda result, error: answered.append(error))
        results: list[int | str] = []
        threads = [infer_slow(stack, 700, results) for _ in range(3)]
        wait_for(lambda: inflight(stack) == 4, 10, "four requests in flight")
        stack.process.send_signal(number)
        assert stack.process.wait(20) == 0, "".join(stack.log)
        for thread in threads:
            thread.join()
        wait_for(lambda: answered, 5, "the gRPC answer")
        grpc_client.close()
    assert results == [200, 200, 200]
    assert answered == [None]
    assert not [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not memory.regions()
    for url in (stack.http_url, stack.engine_http_url, stack.metrics_url):
        with pytest.raises(OSError, match="refused"):
            call("GET", url)


def inflight(stack: RunningStack) -> int:
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return int(float(text.split("\npenstock_inflight_requests ")[1].split("\n")[0]))


def test_ready_says_no_at_once_while_the_drain_delay_serves(tmp_path: Path, repository: Path) -> None:
    """After SIGTERM, ready is 503 at once, and until the delay is over requests are served."""
    with running(tmp_path, repository, "--drain-delay-s", "1.5") as stack:
        stack.process.terminate()
        wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 503, 1, "ready is 503")
        assert is_serving(stack)
        assert call("GET", f"{stack.http_url}/v2/health/live").status == 200
        assert stack.process.wait(20) == 0


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


def test_triton_killed_is_503_within_a_second_and_back_by_itself(tmp_path: Path, repository: Path) -> None:
    """kill -9 of tritonserver: waiting and new requests fail fast, nothing hangs, and service returns."""
    with running(tmp_path, repository) as stack:
        memory = SharedMemory(stack)
        results: list[int | str] = []
        thread = infer_slow(stack, 8000, results)
        wait_for(lambda: inflight(stack) == 1, 10, "one request in flight")
        killed = time.monotonic()
        triton_of(stack).kill()
        thread.join(2)
        assert results == [503]
        assert time.monotonic() - killed < 1.0
        body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
        answer = post_json(f"{stack.http_url}/v2/models/identity/infer", body)
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert call("GET", f"{stack.http_url}/v2/health/live").status == 200
        wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 503, 1, "ready is 503")
        assert call("GET", f"{stack.http_url}/v2/health/ready").json["reason"]
        wait_for(lambda: is_serving(stack), 30, "the engine is back")
        assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200
        text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
        assert "penstock_engine_restarts_total 1.0" in text
        assert inflight(stack) == 0
        assert stop_stack(stack) == 0
    assert not memory.regions()


def test_gateway_killed_is_replaced_and_triton_stays(tmp_path: Path, repository: Path) -> None:
    """kill -9 of the gateway: a new one serves on the same ports in seconds, with the same Triton."""
    with running(tmp_path, repository) as stack:
        memory = SharedMemory(stack)
        engine = triton_of(stack).pid
        old = gateway_of(stack)
        decoders = old.children(recursive=True)
        assert decoders
        old.kill()
        wait_for(lambda: is_serving(stack), 15, "a new gateway serves")
        assert triton_of(stack).pid == engine
        assert gateway_of(stack).pid != old.pid
        wait_for(lambda: not any(child.is_running() for child in decoders), 5, "old decoders are gone")
        text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
        assert "penstock_gateway_restarts_total 1.0" in text
        assert stop_stack(stack) == 0
    assert not memory.regions()


def test_parent_killed_takes_everything_with_it(tmp_path: Path, repository: Path) -> None:
    """kill -9 of `penstock up` itself leaves neither a gateway nor a Triton behind."""
    with running(tmp_path, repository) as stack:
        everyone = family(stack)
        stack.process.kill()
        stack.process.wait()
        wait_for(lambda: not any(child.is_running() for child in everyone), 15, "every process is gone")


def test_hung_triton_is_503_and_serves_after_it_wakes(tmp_path: Path, repository: Path) -> None:
    """SIGSTOP of tritonserver: ready turns 503 and requests are refused; SIGCONT brings service back."""
    with running(tmp_path, repository) as stack:
        triton = triton_of(stack)
        triton.suspend()
        try:
            wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 503, 15, "ready is 503")
            assert not is_serving(stack)
        finally:
            triton.resume()
        wait_for(lambda: is_serving(stack), 30, "service is back")


def fails_to_start(tmp_path: Path, *arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and standard error of a `penstock up` that must not start."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", "up", "--home", str(tmp_path / "home"), *arguments],
        env=environment | (environ or {}),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


ANY_PORTS = [
    *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
    *("--engine-http-port", "0", "--engine-grpc-port", "0", "--engine-metrics-port", "0"),
]


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port", "--engine-grpc-port"])
def test_port_in_use_is_one_line_with_the_flag(tmp_path: Path, flag: str) -> None:
    """Which port, and which flag chooses another; nothing was started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = fails_to_start(tmp_path, *ANY_PORTS, flag, str(port))
    assert code != 0
    assert len(text.splitlines()) == 1
    assert f"127.0.0.1:{port}" in text
    assert flag in text


def test_unknown_setting_is_one_line_with_a_suggestion(tmp_path: Path) -> None:
    """A typo in a variable does not start the stack."""
    code, text = fails_to_start(tmp_path, environ={"PENSTOCK_HTPP_PORT": "1"})
    assert code != 0
    assert len(text.splitlines()) == 1
    assert "did you mean PENSTOCK_HTTP_PORT?" in text


def test_no_triton_binary_is_one_line_with_the_fix(tmp_path: Path) -> None:
    """Where there is no Triton, the message says what to do."""
    environ = {"PATH": "/nonexistent", "PENSTOCK_ENGINE_ENVIRONMENT": str(tmp_path / "none")}
    code, text = fails_to_start(tmp_path, *ANY_PORTS, environ=environ)
    assert code != 0
    assert len(text.splitlines()) == 1
    assert "Triton" in text
    assert "make" in text or "--engine" in text


def test_missing_repository_is_one_line(tmp_path: Path, triton_environment: Path) -> None:
    """A model repository that is not there is named."""
    code, text = fails_to_start(tmp_path, *ANY_PORTS, "--model-repository", str(tmp_path / "nowhere"))
    assert code != 0
    assert f"{tmp_path / 'nowhere'} cannot be read" in text
    assert "Traceback" not in text


def test_home_that_cannot_be_written_still_serves_shipped_models(tmp_path: Path, repository: Path) -> None:
    """PENSTOCK_HOME under a file: a warning, and the shipped models are served."""
    (tmp_path / "file").write_text("")
    stack = start_stack(tmp_path / "file" / "home", "--model-repository", str(repository))
    try:
        assert is_serving(stack)
        assert stack.logged("no folder for pulled models")
    finally:
        stop_stack(stack)


def test_broken_model_is_unavailable_and_the_rest_is_served(tmp_path: Path, repository: Path) -> None:
    """A model that cannot be loaded is said at start with its reason; the others serve."""
    write_model(repository, "broken", "raise ValueError('broken on purpose')\n", SLOW_CONFIG)
    with running(tmp_path, repository) as stack:
        assert is_serving(stack)
        said = [line for line in stack.output if line.startswith("cannot serve broken: ")]
        assert said
        assert "broken on purpose" in said[0]
        assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200


def test_gateway_before_its_engine_becomes_ready_when_the_engine_comes(tmp_path: Path, repository: Path) -> None:
    """An engine given by URL that is not there yet: live 200, ready 503 with the reason; ready once it comes."""
    with running(tmp_path, repository) as engine:
        url = engine.engine_http_url
        engine_grpc = engine.engine_grpc_address
        triton = triton_of(engine)
        triton.suspend()
        try:
            late = start_stack(tmp_path / "late", "--engine", url, "--engine-grpc", engine_grpc, wait=False)
            port = late.wait_for_log("listening").split("http=")[1].split()[0]
            ready = wait_for_answer(f"http://127.0.0.1:{port}/v2/health/ready")
            assert ready == 503
            assert call("GET", f"http://127.0.0.1:{port}/v2/health/live").status == 200
        finally:
            triton.resume()
        wait_until_ready_url(late, f"http://127.0.0.1:{port}")
        assert stop_stack(late) == 0


def wait_for_answer(url: str) -> int:
    wait_for(lambda: _status(url) is not None, 15, f"an answer of {url}")
    return _status(url) or 0


def _status(url: str) -> int | None:
    try:
        return call("GET", url).status
    except OSError:
        return None


def wait_until_ready_url(stack: RunningStack, url: str) -> None:
    wait_for(lambda: _status(f"{url}/v2/health/ready") == 200, 30, "ready")


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
        stack.wait_for_log("3 canary inferences in a row failed, the last on 'identity'.*illegal memory access")
        wait_for(lambda: not psutil.pid_exists(old), 20, "the old Triton is gone")
        flag.unlink()
        wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 200, 40, "ready again")
        text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
        assert "penstock_engine_restarts_total 0.0" not in text
    finally:
        assert stop_stack(stack) == 0


def test_client_that_leaves_frees_its_place_without_an_error_line(tmp_path: Path, repository: Path) -> None:
    """A disconnect while the engine works: nothing in flight at once, counted as cancelled, no error logged."""
    with running(tmp_path, repository) as stack:
        body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [4000]}]})
        address = stack.http_url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as client:
            head = f"POST /v2/models/slow/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
            client.sendall(head.encode())
            wait_for(lambda: inflight(stack) == 1, 5, "one request in flight")
        wait_for(lambda: inflight(stack) == 0, 2, "nothing in flight")
        text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
        assert 'penstock_cancelled_total{protocol="http"} 1.0' in text
        assert not stack.logged("level='error'")


def test_stop_under_steady_load_fails_no_accepted_request(tmp_path: Path, repository: Path) -> None:
    """Clients that keep their connections and never pause see 200 until the port is closed, and nothing else."""
    with running(tmp_path, repository, "--drain-delay-s", "1") as stack:
        outcomes: list[str] = []
        threads = [threading.Thread(target=_load_until_refused, args=(stack, outcomes)) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(outcomes) > 50, 20, "load runs")
        stack.process.terminate()
        assert stack.process.wait(20) == 0
        for thread in threads:
            thread.join(10)
    assert set(outcomes) == {"200", "refused"}, {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
    assert outcomes.count("refused") == len(threads)


def _load_until_refused(stack: RunningStack, outcomes: list[str]) -> None:
    """One keep-alive client, reconnecting when it is told to close."""
    body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [20]}]})
    connection = http.client.HTTPConnection(stack.http_url.removeprefix("http://"), timeout=10)
    while True:
        try:
            if connection.sock is None:
                connection.connect()
        except ConnectionRefusedError:
            outcomes.append("refused")
            return
        try:
            connection.request("POST", "/v2/models/slow/infer", body)
            response = connection.getresponse()
            response.read()
            outcomes.append(str(response.status))
        except OSError as error:
            outcomes.append(repr(error))
            connection.close()


def test_folder_for_run_files_that_cannot_be_written_is_one_line(tmp_path: Path, triton_environment: Path) -> None:
    """No place for temporary files: one sentence with the fix."""
    (tmp_path / f"penstock-{os.getuid()}").write_text("a file where the folder should be")
    code, text = fails_to_start(tmp_path, *ANY_PORTS, environ={"TMPDIR": str(tmp_path)})
    assert code != 0
    assert len(text.splitlines()) == 1
    assert "TMPDIR" in text
