"""The supervisor, with a small fake for what a real Triton rarely does."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engines.triton.endpoints import TritonListeners, pick_free_ports
from penstock.engines.triton.runtime import Launch, TritonRuntime
from penstock.engines.triton.supervisor import (
    EngineState,
    EngineStatus,
    TritonOptions,
    TritonSupervisor,
    triton_arguments,
)
from tests.engines.supervision import WAIT_S, Watcher, claimed_options, is_gone, listening, quick, supervised

CHECKOUT = Path(__file__).resolve().parents[2]

# Answers as a live Triton does; says what happens to it; has a stub-like child.
FAKE = """
import http.server, os, signal, socket, subprocess, sys, threading
argument = lambda name: sys.argv[sys.argv.index(name) + 1]
class Live(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
class Server(http.server.ThreadingHTTPServer):
    def __init__(self, name):
        host = argument(f"--{name}-address")
        self.path = host.removeprefix("unix:")
        self.address_family = socket.AF_INET if self.path == host else socket.AF_UNIX
        super().__init__((host, int(argument(f"--{name}-port"))) if self.path == host else self.path, Live)
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
    def get_request(self): return self.socket.accept()[0], ("client", 0)
threading.Thread(target=Server("metrics").serve_forever, daemon=True).start()
if "--stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
else: signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
stub = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])
print("stub", stub.pid, flush=True)
Server("http").serve_forever()
"""


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def options(tmp_path: Path) -> Iterator[TritonOptions]:
    """Where a Triton of this test may run."""
    with claimed_options(tmp_path) as (_, options):
        yield options


def program(tmp_path: Path, text: str) -> Launch:
    """How a program of ours is started in Triton's place."""
    path = tmp_path / "tritonserver"
    path.write_text(text)
    path.chmod(0o755)
    return TritonRuntime(path).prepare(tmp_path, {"PATH": os.environ["PATH"]})


@pytest.fixture
def fake(tmp_path: Path) -> Launch:
    """The fake Triton."""
    return program(tmp_path, f"#!{sys.executable} -IS\n{FAKE}")


def test_arguments_name_every_repository_socket_and_region() -> None:
    """They select explicit model control, Unix sockets unless a port is given, and regions that the reaper knows."""
    options = TritonOptions(
        "0123456789ab", (Path("/a"), Path("/b")), TritonListeners(Path("/run")), extra_args=("--log-verbose", "1")
    )
    line = " ".join(triton_arguments(options, ("onnxruntime", "python")))
    for part in (
        "--model-repository /a --model-repository /b",
        "--model-control-mode explicit",
        "--http-address unix:/run/triton-http.sock",
        "--grpc-address unix:/run/triton-grpc.sock",
        "--metrics-address unix:/run/triton-metrics.sock",
        "--exit-timeout-secs 30",
        "--backend-config=onnxruntime,shm-region-prefix-name=penstock_0123456789ab_",
        "--backend-config=python,shm-region-prefix-name=penstock_0123456789ab_",
    ):
        assert part in line
    assert line.endswith("--log-verbose 1")
    assert "stub-timeout" not in line
    slow = triton_arguments(options, ("python", "torch"))
    assert "--backend-config=torch,stub-timeout-seconds=120" in slow, "dozens of PyTorch processes start on few cores"
    assert "trace" not in line


def test_arguments_name_the_file_of_traces() -> None:
    """A file that clients cannot name, and nothing written to it until one of them asks for traces."""
    options = TritonOptions("0123456789ab", (), TritonListeners(Path("/run")), trace_file=Path("/var/traces.json"))
    assert "--trace-config triton,file=/var/traces.json" in " ".join(triton_arguments(options, ()))


async def test_run_live_stop_tells_each_state_once(fake: Launch, options: TritonOptions, watcher: Watcher) -> None:
    """starting, running, stopped, with the process id while there is one."""
    async with supervised(fake, options, watcher):
        running = await watcher.until(EngineState.RUNNING)
        assert running.pid is not None
        assert os.getsid(running.pid) == running.pid  # a terminal's Ctrl-C does not reach it
    assert [(status.state, status.pid) for status in watcher.statuses] == [
        (EngineState.STARTING, running.pid),
        (EngineState.RUNNING, running.pid),
        (EngineState.STOPPED, None),
    ]
    assert is_gone(running.pid)
    assert is_gone(watcher.stub_pids[0])
    assert listening(options.listeners.folder) == []


async def test_stop_of_a_stubborn_triton_kills_it_with_its_stubs(
    fake: Launch, options: TritonOptions, watcher: Watcher
) -> None:
    """SIGTERM is asked once; when the grace is over nothing of it lives."""
    async with supervised(fake, replace(options, extra_args=("--stubborn",)), watcher) as process:
        running = await watcher.until(EngineState.RUNNING)
        await process.stop(0.1)
        assert running.pid is not None
        assert is_gone(running.pid)
        assert is_gone(watcher.stub_pids[0])
        assert process.status.state is EngineState.STOPPED


async def test_restart_asked_for_ends_it_and_starts_it_again(
    fake: Launch, options: TritonOptions, watcher: Watcher
) -> None:
    """The reason is reported while it is down; a second plea meanwhile changes nothing."""
    async with supervised(fake, options, watcher) as process:
        assert not process.restart("it does not run yet")
        first = await watcher.until(EngineState.RUNNING)
        assert process.restart("the canary failed")
        assert not process.restart("once more")
        down = await watcher.until(EngineState.RESTARTING)
        assert (down.reason, down.pid) == ("the canary failed", None)
        second = await watcher.until(EngineState.RUNNING)
        assert second.restarts == 1
        assert second.pid != first.pid


async def test_restart_of_a_stubborn_triton_is_cut_short_by_stop(
    fake: Launch, options: TritonOptions, watcher: Watcher
) -> None:
    """A stop does not wait for a restart's grace period."""
    patient = replace(options, extra_args=("--stubborn",), restart_grace_s=1000.0)
    async with supervised(fake, patient, watcher) as process:
        await watcher.until(EngineState.RUNNING)
        process.restart("the canary failed")
        await watcher.until(EngineState.RESTARTING)
        async with asyncio.timeout(WAIT_S):
            await process.stop(0.1)
    assert watcher.statuses[-1].state is EngineState.STOPPED


async def test_restart_of_what_is_lost_gives_it_no_time(fake: Launch, options: TritonOptions, watcher: Watcher) -> None:
    """A Triton whose card's clients have all failed is killed at once, however long its grace is."""
    patient = replace(options, extra_args=("--stubborn",), restart_grace_s=1000.0)
    async with supervised(fake, patient, watcher) as process:
        await watcher.until(EngineState.RUNNING)
        assert process.restart("a fault", is_lost=True)
        assert (await watcher.until(EngineState.RUNNING)).restarts == 1
        await process.stop(0.1)


async def test_start_waits_until_it_is_allowed_and_no_longer_than_until_stop(
    fake: Launch, options: TritonOptions, watcher: Watcher
) -> None:
    """Before each start; nothing of it runs meanwhile."""
    allowed, asked = asyncio.Event(), asyncio.Queue[None]()

    async def gate() -> None:
        asked.put_nowait(None)
        await allowed.wait()

    process = TritonSupervisor(
        fake, options, emit=watcher.emit, on_status=watcher.on_status, backoff=quick(), before_start=gate
    )
    task = asyncio.create_task(process.run())
    await asked.get()
    assert watcher.statuses == []
    allowed.set()
    await watcher.until(EngineState.RUNNING)
    allowed.clear()
    process.restart("once more", is_lost=True)
    await asked.get()
    assert process.status.state is EngineState.RESTARTING
    await asyncio.wait_for(process.stop(5.0), WAIT_S)
    await task
    assert [status.state for status in watcher.statuses].count(EngineState.RUNNING) == 1


async def test_cancelled_run_kills_at_once_and_clears_up(
    fake: Launch, options: TritonOptions, watcher: Watcher
) -> None:
    """The second Ctrl-C: no grace, nothing left."""
    process = TritonSupervisor(fake, options, emit=watcher.emit, on_status=watcher.on_status)
    task = asyncio.create_task(process.run())
    running = await watcher.until(EngineState.RUNNING)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running.pid is not None
    assert is_gone(running.pid)
    assert is_gone(watcher.stub_pids[0])
    assert process.status.state is EngineState.STOPPED


async def test_stop_before_run_leaves_nothing_to_run(fake: Launch, options: TritonOptions, watcher: Watcher) -> None:
    """A stack that is stopped while it starts does not start Triton after all."""
    process = TritonSupervisor(fake, options, emit=watcher.emit, on_status=watcher.on_status)
    await process.stop(1.0)
    await process.run()
    assert [status.state for status in watcher.statuses] == [EngineState.STOPPED]


async def test_program_that_ends_each_time_fails_with_its_last_words(
    tmp_path: Path, options: TritonOptions, watcher: Watcher
) -> None:
    """Five starts, then the reason; it is not tried for ever."""
    broken = program(
        tmp_path, "#!/bin/sh\necho trying\necho 'libcuda.so.1: cannot open shared object file' >&2\nexit 3\n"
    )
    process = TritonSupervisor(broken, options, emit=watcher.emit, on_status=watcher.on_status, backoff=quick())
    async with asyncio.timeout(WAIT_S):
        await process.run()
    assert process.status == EngineStatus(
        EngineState.FAILED,
        "5 starts failed; the last: tritonserver exited with code 3: libcuda.so.1: cannot open shared object file",
        restarts=4,
    )
    assert watcher.log.count("trying") == 5
    await process.stop(1.0)  # harmless afterwards
    assert process.status.state is EngineState.FAILED


async def test_program_that_cannot_be_executed_fails_with_the_reason(
    tmp_path: Path, options: TritonOptions, watcher: Watcher
) -> None:
    """No traceback of the launcher, one line."""
    absent = Launch((str(tmp_path / "absent"),), {})
    process = TritonSupervisor(absent, options, emit=watcher.emit, on_status=watcher.on_status, backoff=quick())
    await process.run()
    assert process.status.reason.endswith("absent cannot be executed: No such file or directory")


async def test_program_that_never_answers_fails_in_its_time(
    tmp_path: Path, options: TritonOptions, watcher: Watcher
) -> None:
    """A start that hangs is ended and counts as failed."""
    deaf = program(tmp_path, "#!/bin/sh\nexec sleep 1000\n")
    impatient = replace(options, live_timeout_s=0.1)
    process = TritonSupervisor(deaf, impatient, emit=watcher.emit, on_status=watcher.on_status, backoff=quick())
    async with asyncio.timeout(WAIT_S):
        await process.run()
    assert process.status.state is EngineState.FAILED
    assert f"did not answer on {options.listeners.http_url} within 0.1 s" in process.status.reason


@pytest.mark.parametrize("which", ["http_port", "grpc_port", "metrics_port"])
async def test_port_in_use_at_the_start_fails_at_once_and_names_it(
    fake: Launch, options: TritonOptions, watcher: Watcher, which: str
) -> None:
    """One line, before any process is made."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = replace(options, listeners=replace(options.listeners, **{which: port}))
        process = TritonSupervisor(fake, taken, emit=watcher.emit, on_status=watcher.on_status)
        await process.run()
    assert [status.state for status in watcher.statuses] == [EngineState.FAILED]
    assert f"port {port} on 127.0.0.1" in process.status.reason
    assert "in use" in process.status.reason


async def test_port_taken_while_it_was_down_is_waited_for(
    fake: Launch, options: TritonOptions, watcher: Watcher
) -> None:
    """What ran before comes back as soon as it can; the reason says what it waits for."""
    (port,) = pick_free_ports("127.0.0.1", 1)
    options = replace(options, listeners=replace(options.listeners, http_port=port))
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        async with supervised(fake, options, watcher):
            running = await watcher.until(EngineState.RUNNING)
            watcher.once_down = lambda: (thief.bind(("127.0.0.1", port)), thief.listen())
            assert running.pid is not None
            os.kill(running.pid, signal.SIGKILL)
            while "in use" not in (await watcher.until(EngineState.RESTARTING)).reason:
                pass
            thief.close()
            assert (await watcher.until(EngineState.RUNNING)).restarts >= 1


async def test_missing_repository_fails_at_once(fake: Launch, options: TritonOptions, watcher: Watcher) -> None:
    """The folder is named."""
    nowhere = replace(options, repositories=(Path("/absent/models"),))
    process = TritonSupervisor(fake, nowhere, emit=watcher.emit, on_status=watcher.on_status)
    await process.run()
    assert process.status.reason.startswith("the model repository /absent/models is not a folder")


async def test_flood_of_output_neither_blocks_it_nor_fills_our_log(
    tmp_path: Path, options: TritonOptions, watcher: Watcher
) -> None:
    """1 MiB in one go are read to the end; the log gets its ration."""
    loud = program(
        tmp_path, "#!/bin/sh\nyes 'a model that prints in a loop' | head -c 1048576\nprintf '\\nthe end\\n'\nexit 3\n"
    )
    process = TritonSupervisor(loud, options, emit=watcher.emit, on_status=watcher.on_status, backoff=quick())
    async with asyncio.timeout(WAIT_S):
        await process.run()
    assert process.status.reason.endswith("exited with code 3: the end")
    assert len(watcher.log) < 10_000
    assert "Triton writes too fast; log lines dropped" in watcher.log


def test_launcher_whose_parent_is_gone_starts_nothing(tmp_path: Path) -> None:
    """The race between a start and the death of its starter ends with no process, not with an orphan."""
    launcher = CHECKOUT / "server" / "penstock" / "engines" / "triton" / "launch.py"
    witness = tmp_path / "witness"
    command = [sys.executable, "-I", "-S", str(launcher), "1", "/usr/bin/touch", str(witness)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "process 1" in done.stderr
    assert not witness.exists()
