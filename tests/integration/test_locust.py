"""The load test, headless, against the real stack: every kind of user, a scenario, and more than one process."""

import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.engines.triton.endpoints import pick_free_ports
from tests.integration.pictures import frames, jpeg
from tests.support.stack import CHECKOUT, RunningStack

pytestmark = pytest.mark.xdist_group("stack")

LOCUST = [sys.executable, "-m", "locust", "-f", "loadtest/penstock_load/locustfile.py"]
HEADLESS = ["--headless", "--json", "--only-summary"]
SCENARIO = """
name = "small"
about = "Pictures and tensors."
slo_p99_ms = 5000
[[request]]
kind = "image"
model = "street"
[[request]]
kind = "rest"
model = "identity_fp32"
sizes = [16]
share = 3
[[request]]
kind = "grpc"
model = "identity_fp32"
sizes = [16]
share = 3
[[phase]]
name = "warm-up"
seconds = 1
arrivals = { shape = "constant", rate = 5 }
[[phase]]
name = "steady"
seconds = 3
arrivals = { shape = "poisson", rate = 8 }
is_judged = true
"""


def where(stack: RunningStack) -> list[str]:
    return ["--host", stack.http_url, "--grpc", stack.grpc_address, "--stop-timeout", "10"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """locust until it ends by itself."""
    command = [*LOCUST, *HEADLESS, *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False)


def rows(output: str) -> dict[str, int]:
    """The statistics, which are all of standard output: requests by name."""
    found = json.loads(output[output.index("[") :])
    assert all(row["num_failures"] == 0 for row in found), found
    return {row["name"]: row["num_requests"] for row in found}


def ask(stack: RunningStack, *arguments: str) -> None:
    """A second of four users of one kind: an answer each at least, and no failure."""
    answer = run(*where(stack), "-u", "4", "-r", "4", "-t", "1s", *arguments)
    assert answer.returncode == 0, answer.stderr
    (requests,) = rows(answer.stdout).values()
    assert requests >= 4


def counted(stack: RunningStack) -> Counter[str]:
    """The number of answered inference requests, by the metric's labels."""
    with urllib.request.urlopen(stack.metrics_url, timeout=10) as answer:
        page = answer.read().decode()
    samples = re.findall(r"^penstock_requests_total\{(.*)\} (\S+)$", page, re.MULTILINE)
    return Counter({labels: int(float(value)) for labels, value in samples})


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of locust that does not outlive the block."""
    process = subprocess.Popen(
        [*LOCUST, *arguments], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_image_users_with_street_pictures_get_results(stack: RunningStack, shared_dir: Path, tmp_path: Path) -> None:
    """Four users of the image endpoint, without a failure."""
    for index, picture in enumerate(frames(shared_dir / "media" / "vtest.avi")):
        (tmp_path / f"{index}.jpg").write_bytes(jpeg(picture))
    ask(stack, "--model", "fastestdet", "--images", str(tmp_path), "ImageUser")


@pytest.mark.long
def test_image_users_with_generated_pictures_get_results(stack: RunningStack) -> None:
    """The shipped model and no picture of one's own are enough for a first load test."""
    ask(stack, "ImageUser")


@pytest.mark.long
@pytest.mark.parametrize("user", ["RestUser", "GrpcUser"])
@pytest.mark.parametrize("model", ["identity_bytes", "identity_fp32", "street"])
def test_tensor_users_get_answers(stack: RunningStack, model: str, user: str) -> None:
    """Four users of the tensor path, without a failure, whatever the model takes."""
    ask(stack, "--model", model, user)


@pytest.mark.long
def test_stream_users_get_answers(stack: RunningStack) -> None:
    """Each user keeps one stream to the gateway."""
    ask(stack, "--model", "identity_fp32", "StreamUser")


def test_a_scenario_is_asked_at_its_rates_and_judged(stack: RunningStack, tmp_path: Path) -> None:
    """About 29 requests, a row a kind and phase; its SLO is the verdict, and the server counted as many."""
    (tmp_path / "small.toml").write_text(SCENARIO)
    before = counted(stack)
    answer = run(*where(stack), "--scenario", str(tmp_path / "small.toml"))
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.split()[-1] == "PASS"
    found = rows(answer.stdout)
    kinds = ("image street", "rest identity_fp32", "grpc identity_fp32")
    steady = {name for name in found if name.endswith("steady")}
    few, *others = (f"{kind} · steady" for kind in kinds)  # 3.4, 10 and 10 requests on average
    assert set(others) <= steady <= {few, *others}
    assert 8 <= sum(found.values()) <= 60  # 29 on average; a busy machine starts late, and sends fewer
    answered = counted(stack) - before
    assert answered.total() == sum(found.values()), (answered, found)


@pytest.mark.long
def test_a_scenario_that_misses_its_slo_fails(stack: RunningStack, tmp_path: Path) -> None:
    """The same load under an SLO that nothing can keep."""
    (tmp_path / "small.toml").write_text(SCENARIO)
    answer = run(*where(stack), "--scenario", str(tmp_path / "small.toml"), "--slo-p99-ms", "0.01", "-t", "3s")
    assert answer.returncode == 1, answer.stderr
    assert answer.stderr.split()[-1] == "FAIL"


def test_two_workers_and_their_master_add_up(stack: RunningStack) -> None:
    """The options are the master's alone; what it counts is what the workers sent and what the server answered."""
    (port,) = map(str, pick_free_ports("127.0.0.1", 1))
    before = counted(stack)
    worker = ["--worker", "--master-port", port, "GrpcUser"]
    load = ["-u", "4", "-r", "4", "-t", "3s", "--model", "identity_fp32"]
    with started(*worker) as one, started(*worker) as two:
        master = ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--expect-workers", "2"]
        answer = run(*where(stack), *master, *load, "GrpcUser")
        logs = [process.communicate(timeout=30)[0] for process in (one, two)]
        assert answer.returncode == 0, answer.stderr
        assert (one.returncode, two.returncode) == (0, 0), logs
    sent = [int(re.findall(r"this worker sent (\d+) requests, 0 failed", log)[0]) for log in logs]
    assert all(requests > 0 for requests in sent)
    assert rows(answer.stdout) == {"grpc identity_fp32": sum(sent)}
    answered = counted(stack) - before
    assert answered.total() == sum(sent), answered


@pytest.mark.long
def test_a_worker_without_the_pictures_ends_the_run(stack: RunningStack) -> None:
    """At once and not after an hour, and the master says which machine lacks what."""
    (port,) = map(str, pick_free_ports("127.0.0.1", 1))
    ports = ["--master-bind-host", "127.0.0.1", "--master-bind-port", port, "--master-port", port]
    answer = run(*where(stack), *ports, "--processes", "1", "-t", "1h", "--images", "/nowhere", "ImageUser")
    assert answer.returncode == 1
    assert "no pictures to send" in answer.stderr
