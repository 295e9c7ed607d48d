"""A real Triton that serves copies of single shipped models."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from tritonclient import http as triton_http

from penstock.engines.triton.endpoints import pick_free_ports
from penstock.engines.triton.runtime import find_triton

SHIPPED = Path(__file__).resolve().parents[2] / "model_repository"
READY_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 30.0

ServeModel = Callable[[str], triton_http.InferenceServerClient]


@pytest.fixture(scope="module")
def serve_model(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeModel]:
    """Starts a Triton with one shipped model and gives its client; all are stopped at the end."""
    with ExitStack() as stack:

        def serve(name: str) -> triton_http.InferenceServerClient:
            return stack.enter_context(_served(name, triton_environment, tmp_path_factory.mktemp(name)))

        yield serve


@contextmanager
def _served(name: str, environment: Path, folder: Path) -> Iterator[triton_http.InferenceServerClient]:
    """A copy of the model is served: Python leaves bytecode beside what it runs."""
    shutil.copytree(SHIPPED / name, folder / "models" / name, ignore=shutil.ignore_patterns("__pycache__"))
    launch = find_triton(environment=environment).prepare(folder)
    ports = dict(zip(("http", "grpc", "metrics"), pick_free_ports("127.0.0.1", 3), strict=True))
    listening = [
        flag for kind, port in ports.items() for flag in (f"--{kind}-port={port}", f"--{kind}-address=127.0.0.1")
    ]
    command = [*launch.argv, f"--model-repository={folder / 'models'}", *listening]
    log_path = folder / "triton.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=dict(launch.env))
    client = triton_http.InferenceServerClient(f"127.0.0.1:{ports['http']}", network_timeout=60)
    try:
        _wait_until_ready(client, process, log_path)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _wait_until_ready(client: triton_http.InferenceServerClient, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < until:
        assert process.poll() is None, f"Triton ended with {process.returncode}:\n{log.read_text()[-4000:]}"
        with suppress(OSError):
            if client.is_server_ready():
                return
        time.sleep(0.05)
    raise AssertionError(f"Triton was not ready in {READY_TIMEOUT_S} s:\n{log.read_text()[-4000:]}")
