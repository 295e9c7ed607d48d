"""The supervisor, with the real Triton."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest

from penstock.engines.run_directory import claim_run_directory, region_prefix
from penstock.engines.triton.endpoints import TritonListeners
from penstock.engines.triton.runtime import Launch, find_triton
from penstock.engines.triton.supervisor import EngineState, TritonOptions, TritonSupervisor
from penstock.gateway.workers.running_stacks import reachable_folder
from tests.engines import onnx_models
from tests.engines.supervision import (
    WAIT_S,
    Watcher,
    claimed_options,
    is_gone,
    listening,
    quick,
    regions_of,
    supervised,
)
from tests.support.tiny_models import copy_identity, write_tiny_repository

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def real(triton_environment: Path, tmp_path: Path) -> Iterator[tuple[Launch, TritonOptions]]:
    """The real Triton, and models that run in stubs: of the python backend and of ours."""
    with claimed_options(tmp_path) as (run_dir, options):
        write_tiny_repository(options.repositories[0])
        copy_identity(options.repositories[0])
        onnx_models.save(onnx_models.identity(), options.repositories[0], "onnx", config='backend: "onnxruntime"')
        yield find_triton(environment=triton_environment, search_path="").prepare(run_dir.path), options


def load(options: TritonOptions, model: str) -> None:
    """What the gateway does with each of its models."""
    connection = HTTPConnection("localhost")
    with contextlib.closing(connection), socket.socket(socket.AF_UNIX) as connection.sock:
        connection.sock.settimeout(WAIT_S)
        connection.sock.connect(options.listeners.http_url.removeprefix("unix://"))
        connection.request("POST", f"/v2/repository/models/{model}/load", b"{}")
        assert connection.getresponse().status == 200


def stubs_of(engine_id: str) -> list[int]:
    """The stub processes whose command line names a region of the engine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if any(word.startswith(region_prefix(engine_id).encode()) for word in words):
                found.append(int(path.parent.name))
    return found


async def test_real_triton_killed_comes_back_and_leaves_nothing(
    real: tuple[Launch, TritonOptions], watcher: Watcher
) -> None:
    """After kill -9 it is reported, cleaned up and restarted; a stop leaves no listener and no memory."""
    launch, options = real
    engine_id = options.engine_id
    async with supervised(launch, options, watcher):
        running = await watcher.until(EngineState.RUNNING)
        await asyncio.to_thread(load, options, "identity_fp32")
        (stub,), regions = stubs_of(engine_id), regions_of(engine_id)
        assert len(regions) == 1
        assert running.pid is not None
        os.kill(running.pid, signal.SIGKILL)
        down = await watcher.until(EngineState.RESTARTING)
        assert down.reason == "tritonserver was killed by signal 9 (Killed)"
        assert is_gone(stub)
        assert regions_of(engine_id) == []
        again = await watcher.until(EngineState.RUNNING)
        assert again.restarts == 1
        await asyncio.to_thread(load, options, "identity_fp32")
        assert len(regions_of(engine_id)) == 1
    assert regions_of(engine_id) == []
    assert stubs_of(engine_id) == []
    assert listening(options.listeners.folder) == []
    assert "successfully loaded 'identity_fp32'" in watcher.log


async def test_real_triton_with_an_option_that_it_does_not_know_fails_with_its_words(
    real: tuple[Launch, TritonOptions], watcher: Watcher
) -> None:
    """Its own complaint is in the reason."""
    launch, options = real
    wrong = replace(options, extra_args=("--no-such-option",))
    process = TritonSupervisor(launch, wrong, emit=watcher.emit, on_status=watcher.on_status, backoff=quick())
    async with asyncio.timeout(WAIT_S):
        await process.run()
    assert process.status.state is EngineState.FAILED
    assert "exited with code" in process.status.reason


PARENT = """
import asyncio, os, sys, threading
from pathlib import Path
from penstock.engines.run_directory import claim_run_directory
from penstock.engines.triton.endpoints import TritonListeners
from penstock.engines.triton.supervisor import TritonOptions, TritonSupervisor
from penstock.engines.triton.runtime import find_triton
from penstock.gateway.workers.running_stacks import reachable_folder
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()  # an aborted test leaves nothing
environment, base, models = sys.argv[1:]
run_dir, _ = claim_run_directory(Path(base))
listeners = TritonListeners(reachable_folder(run_dir.path))
options = TritonOptions(run_dir.engine_id, (Path(models),), listeners)
launch = find_triton(environment=Path(environment), search_path="").prepare(run_dir.path)
tell = lambda status: print(run_dir.engine_id, status.state, status.pid, flush=True)
asyncio.run(TritonSupervisor(launch, options, emit=lambda *_, **__: None, on_status=tell).run())
"""


def test_real_triton_whose_parent_is_killed_dies_with_it(
    triton_environment: Path, real: tuple[Launch, TritonOptions], tmp_path: Path
) -> None:
    """Triton at once, by the kernel; its stubs, at the latest, when the next start sweeps."""
    _, options = real
    base = tmp_path / "parents"
    command = [sys.executable, "-c", PARENT, str(triton_environment), str(base), str(options.repositories[0])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=CHECKOUT, text=True, **pipes) as parent:
        try:
            assert parent.stdout is not None
            lines = (line.split() for line in parent.stdout)
            engine_id, _, pid = next(line for line in lines if line[1] == EngineState.RUNNING)
            own = replace(options, listeners=TritonListeners(reachable_folder(base / f"run-{engine_id}")))
            load(own, "slow")
            load(own, "onnx")
            stubs = stubs_of(engine_id)
            assert len(stubs) >= 3  # two of the python backend, at least one of ours
            assert len(regions_of(engine_id)) == len(stubs)
        finally:
            parent.kill()
    assert is_gone(int(pid), within_s=WAIT_S)
    run_dir, (left,) = claim_run_directory(base)
    with run_dir:
        assert all(is_gone(stub) for stub in stubs)
        assert left.survivors == ()
        assert regions_of(engine_id) == []
        assert [path.name for path in base.glob("run-*")] == [run_dir.path.name]
