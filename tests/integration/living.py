"""A stack of its own for a test, and what to see of it from outside."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.http import call, post_json
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.support.tiny_models import CONFIG, GATE, IDENTITY, SLOW, write_model

COUNTED_WITHIN_S = 10.0  # Triton counts a request a moment after it answered it
SLOW_CONFIG = CONFIG.format(max_batch_size=0, data_type="TYPE_FP32", count=2)
ANY_PORTS = [*("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")]


def write_quick_models(folder: Path) -> Path:
    """The repository, with `identity` and `slow`, which sleeps for as many milliseconds as it is asked to."""
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
    """Shared memory regions of this stack's engine only."""

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
        if child.cmdline()[1:3] == ["-m", "penstock.gateway"] and child.ppid() == stack.process.pid
    )


@contextmanager
def gate_closed(stack: RunningStack) -> Iterator[None]:
    """Models written by `write_held` do not answer inside the block, in any process of the stack."""
    gate = stack.home.parent / GATE
    gate.unlink()
    try:
        yield
    finally:
        gate.touch()


def infer_slow(stack: RunningStack, ms: float, results: list[int | str], model: str = "slow") -> threading.Thread:
    """One REST request that takes so long, in a thread; its status goes to the list."""

    def work() -> None:
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [ms]}]}
        try:
            results.append(post_json(f"{stack.http_url}/v2/models/{model}/infer", body).status)
        except OSError as error:
            results.append(repr(error))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def is_serving(stack: RunningStack) -> bool:
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    try:
        return post_json(f"{stack.http_url}/v2/models/identity/infer", body).status == 200
    except OSError:
        return False


def inflight(stack: RunningStack) -> int:
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return int(float(text.split("\npenstock_inflight_requests ")[1].split("\n")[0]))


def fails_to_start(tmp_path: Path, *arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and standard error of a `penstock up` that must not start."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "up", "--home", str(tmp_path / "home"), *arguments],
        env=environment | {"PENSTOCK_CONSOLE": "off"} | (environ or {}),  # its port may be taken
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr
