"""On a real card: `penstock up --mps on` with four instances of a torch model, and what the end of one costs the rest.

    PENSTOCK_ENGINE_ENVIRONMENT=DIR python -m pytest -p no:randomly -s tests/gpu/test_mps_gpu.py

Less than a minute. Each fault is made while callers ask on; its line says who failed, and how long until all served
again. With -s the lines are shown; $PENSTOCK_GPU_REPORT names a file that gets them as JSON.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.bench.gpu.programs import PenstockUp
from penstock.engines.triton.runtime import TritonUnavailable, default_environment, find_triton
from penstock.gpu.mps.control import PIPE_DIRECTORY, MpsControl
from tests.support.stack import CHECKOUT

pytestmark = pytest.mark.gpu
MODEL = "resnet50-torch-random"
INSTANCES, CALLERS = 4, 8
UP_S, RECOVERY_S, CALM_S, SEEN_S = 60.0, 45.0, 1.0, 2.5
CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"


@dataclass
class Answers:
    """When each request was sent and answered, and what was wrong with it; monotonic seconds."""

    rows: list[tuple[float, float, str]] = field(default_factory=list)

    def since(self, moment: float) -> list[tuple[float, float, str]]:
        return [row for row in list(self.rows) if row[1] >= moment]


@dataclass
class FaultOutcome:
    """One fault: requests answered and failed after it, their errors, and how long until all served again."""

    fault: str
    answered: int
    failed: int
    said: list[str]
    all_serve_after_s: float
    clients_before: int
    clients_after: int
    restarts: int
    recovery_s: float


class Served:
    """The stack, with callers that ask on."""

    def __init__(self, up: PenstockUp, home: Path) -> None:
        """pipes: the daemon's directory, as the model's processes see it."""
        self.up, self.home = up, home
        self.pipes: str = self.stubs()[0].environ()[PIPE_DIRECTORY]
        self.answers = Answers()
        self.url = f"http://127.0.0.1:{up.port}"
        self._stop = threading.Event()
        self._body, self._head = request_of_one_image()
        self._callers = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(CALLERS)]

    def __enter__(self) -> "Served":
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for caller in self._callers:
            caller.join(10)

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            sent = time.monotonic()
            failure = self._ask()
            self.answers.rows.append((sent, time.monotonic(), failure))
            if failure:
                time.sleep(0.02)

    def _ask(self) -> str:
        request = urllib.request.Request(f"{self.url}/v2/models/{MODEL}/infer", self._body, self._head)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                answer.read()
                return ""
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode(errors='replace')[:160]}"
        except OSError as error:
            return repr(error)[:160]

    def metric(self, name: str) -> float:
        """Of the gateway's page."""
        text = (self.home / "up.log").read_text()
        page = re.findall(r"metrics (http\S+)", text)[-1]
        with urllib.request.urlopen(page, timeout=10) as answer:
            found = re.search(rf"^penstock_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else -1.0

    def stubs(self) -> list[psutil.Process]:
        """The model's processes that live."""
        found = []
        for process in self.up.processes():
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("triton_python_b") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def until_all_serve(self, since: float, *, at_least_s: float = 0.0) -> float:
        """Seconds from then to the last failure's end: no failure for CALM_S, every instance there and attached."""
        until = time.monotonic() + RECOVERY_S
        while time.monotonic() < until:
            now = time.monotonic()
            bad = [row[1] for row in self.answers.since(since) if row[2]]
            last = max(bad, default=since)
            good = sum(1 for row in self.answers.since(max(last, now - CALM_S)) if not row[2])
            if (
                now - since >= at_least_s
                and now - last >= CALM_S
                and good >= CALLERS
                and len(self.clients()) >= INSTANCES
            ):
                return last - since
            time.sleep(0.1)
        raise AssertionError(f"not all serve {RECOVERY_S:g} s later; the log ends: {self.log_end()}")

    def clients(self) -> set[int]:
        """The instances that the MPS server lists."""
        status = asyncio.run(MpsControl(Path(self.pipes)).status())
        return set(status.clients) & {stub.pid for stub in self.stubs()}

    def log_end(self) -> str:
        return (self.home / "up.log").read_text()[-3000:]


def request_of_one_image() -> tuple[bytes, dict[str, str]]:
    """A v2 request with binary data, and its headers."""
    image = bytes(3 * 224 * 224 * 4)
    tensor = {"name": "image", "shape": [1, 3, 224, 224], "datatype": "FP32"}
    head = json.dumps({"inputs": [tensor | {"parameters": {"binary_data_size": len(image)}}]}).encode()
    return head + image, {"Inference-Header-Content-Length": str(len(head))}


def environment() -> Path:
    """Of Triton and its models; the test is skipped where there is none."""
    folder = Path(os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT") or default_environment(Path(sys.prefix)))
    try:
        find_triton(environment=folder)
    except TritonUnavailable as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The stack under MPS with all instances attached, and callers at work."""
    pytest.importorskip("torch", reason="needs torch: make gpu")
    triton = environment()
    home = tmp_path_factory.mktemp("mps")
    subprocess.run(
        [sys.executable, "-m", "deploy.models.resnet50_torch", "--home", home, "--instances", str(INSTANCES),
         "--max-batch", "8"],
        cwd=CHECKOUT, check=True, timeout=120, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # torch may be in another's packages
    )  # fmt: skip
    with PenstockUp(home, [MODEL], "--mps", "on", environment=triton) as up:
        up.wait(time.monotonic() + UP_S)
        with Served(up, home) as stack:
            yield stack


@pytest.fixture(scope="module")
def report() -> Iterator[list[FaultOutcome]]:
    """What the tests found; shown, and kept where $PENSTOCK_GPU_REPORT says."""
    rows: list[FaultOutcome] = []
    yield rows
    for row in rows:
        sys.stdout.write(
            f"\n{row.fault}: {row.failed} of {row.failed + row.answered} requests failed; all serve again after "
            f"{row.all_serve_after_s:.2f} s; clients {row.clients_before} -> {row.clients_after}; restarts of all "
            f"{row.restarts}, recovery {row.recovery_s:.2f} s; said {row.said}\n"
        )
    if path := os.environ.get("PENSTOCK_GPU_REPORT"):
        Path(path).write_text(json.dumps([asdict(row) for row in rows], indent=1))


def after(served: Served, report: list[FaultOutcome], fault: str, break_it: Callable[[], object]) -> FaultOutcome:
    """Breaks it while callers ask, waits until all serve, and tells."""
    served.until_all_serve(time.monotonic() - CALM_S)
    before, restarts = len(served.clients()), served.metric("mps_restarts_total")
    time.sleep(1.0)
    began = time.monotonic()
    break_it()
    seconds = served.until_all_serve(began, at_least_s=SEEN_S)
    rows = served.answers.since(began)
    failed = [row[2] for row in rows if row[2]]
    outcome = FaultOutcome(
        fault, len(rows) - len(failed), len(failed), sorted(set(failed))[:4], seconds, before, len(served.clients()),
        int(served.metric("mps_restarts_total") - restarts), served.metric("mps_recovery_seconds"),
    )  # fmt: skip
    report.append(outcome)
    return outcome


def mps_process(name: str, pipes: str) -> psutil.Process:
    """The daemon or server of that directory; both names are longer than what Linux keeps of one."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if words and Path(words[0]).name == name and process.environ().get(PIPE_DIRECTORY) == pipes:
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"no {name} in {pipes}")


def test_instances_are_all_clients_of_mps(served: Served) -> None:
    """Each process of the model is listed by the MPS server, and the gateway's metric counts them."""
    served.until_all_serve(time.monotonic())
    assert served.clients() == {stub.pid for stub in served.stubs()}
    assert len(served.stubs()) >= INSTANCES
    assert served.metric("mps_clients") >= INSTANCES
    assert served.metric("mps_unattached_processes") == 0


def test_client_that_is_killed_costs_the_others_nothing(served: Served, report: list[FaultOutcome]) -> None:
    """FAULTS 69: what it computed fails; the others go on, and its place is filled again."""
    others = served.stubs()[1:]
    outcome = after(served, report, "one client killed", served.stubs()[0].kill)
    assert outcome.answered > outcome.failed
    assert outcome.restarts == 0
    assert outcome.clients_after >= INSTANCES
    assert others


def test_client_that_faults_ends_what_shares_its_server_and_all_serve_again(
    served: Served, report: list[FaultOutcome]
) -> None:
    """FAULTS 68: another client writes where it may not; whatever that ends is started again, under MPS."""
    environ: dict[str, Any] = os.environ | {PIPE_DIRECTORY: served.pipes}

    def stray() -> None:
        subprocess.run(
            [sys.executable, "-m", "loadtest.bench.gpu.rogue"],
            input=b"now\n", env=environ, cwd=CHECKOUT, timeout=30, check=False, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    outcome = after(served, report, "illegal memory access of another client", stray)
    assert outcome.clients_after >= INSTANCES


def test_daemon_that_is_killed_is_replaced_and_all_clients_attach_to_the_new_one(
    served: Served, report: list[FaultOutcome]
) -> None:
    """FAULTS 67: daemon, server and clients are started again in order."""
    daemon = mps_process(CONTROL, served.pipes)
    outcome = after(served, report, "control daemon killed", lambda: daemon.send_signal(signal.SIGKILL))
    assert (outcome.restarts, outcome.clients_after >= INSTANCES) == (1, True)


def test_server_that_is_killed_is_replaced_and_all_clients_attach_to_the_new_one(
    served: Served, report: list[FaultOutcome]
) -> None:
    """FAULTS 68: its clients' contexts go with it."""
    server = mps_process(SERVER, served.pipes)
    outcome = after(served, report, "MPS server killed", lambda: server.send_signal(signal.SIGKILL))
    assert (outcome.restarts, outcome.clients_after >= INSTANCES) == (1, True)
