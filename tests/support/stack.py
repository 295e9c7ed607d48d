"""`penstock up` as a child process, on ports of its own."""

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

CHECKOUT = Path(__file__).resolve().parents[2]
TRITON_ENVIRONMENT = CHECKOUT / ".venv-triton"
READY_TIMEOUT_S = 90.0
ENGINE_PORTS = ("--engine-http-port", "0", "--engine-grpc-port", "0", "--engine-metrics-port", "0")


@dataclass
class RunningStack:
    """`penstock up` as a child process, on ports of its own."""

    process: subprocess.Popen[str]
    home: Path
    http_url: str = ""
    grpc_address: str = ""
    metrics_url: str = ""
    engine_http_url: str = ""
    engine_grpc_address: str = ""
    console_url: str = ""
    output: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def logged(self, pattern: str) -> list[str]:
        """The log lines that match."""
        return [line for line in list(self.log) if re.search(pattern, line)]

    def wait_for_log(self, pattern: str, timeout_s: float = 60.0) -> str:
        """The first log line that matches, waited for."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if found := self.logged(pattern):
                return found[0]
            time.sleep(0.05)
        raise AssertionError(f"no log line matches {pattern!r} within {timeout_s} s; the log:\n" + "".join(self.log))


def start_stack(
    home: Path,
    *arguments: str,
    environ: dict[str, str] | None = None,
    wait: bool = True,
    wrapper: tuple[str, ...] = (),
    folder: Path = CHECKOUT,
    command: str = "up",
) -> RunningStack:
    """Starts `penstock up` on ephemeral ports, with Triton unless an engine is named; ENGINE_PORTS open Triton's own.

    With wait, returns when it has printed that it is ready. wrapper: a command that runs the one after it.
    folder: where it runs. command: another that starts a stack.
    """
    engine = () if "--engine" in arguments else ("--engine", "triton")
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment["PENSTOCK_DECODERS"] = "1"  # each costs 0.2 s of CPU at its start
    environment["PENSTOCK_CONSOLE"] = "off"  # costs half a second of CPU
    process = subprocess.Popen(
        [
            *wrapper,
            *(sys.executable, "-P", "-m", "penstock.cli.main", command),
            *("--home", str(home)),
            *ports,
            *engine,
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | (environ or {}),
        cwd=folder,
        start_new_session=True,
    )
    stack = RunningStack(process, home)
    for stream, lines in ((process.stdout, stack.output), (process.stderr, stack.log)):
        threading.Thread(target=_collect, args=(stream, lines), daemon=True).start()
    if wait:
        wait_until_ready(stack)
    return stack


def _collect(stream: IO[str], lines: list[str]) -> None:
    with stream:
        lines.extend(iter(stream.readline, ""))


def wait_until_ready(stack: RunningStack) -> None:
    """Reads the URLs from the stack's last line."""
    until = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < until:
        for line in list(stack.output):
            found = re.match(r"ready: REST (\S+)  gRPC (\S+)  metrics (\S+)", line)
            if found:
                stack.http_url, stack.grpc_address, stack.metrics_url = found.groups()
                stack.console_url = next((one.split()[1] for one in stack.output if one.startswith("console: ")), "")
                _read_engine_ports(stack)
                return
        if stack.process.poll() is not None:
            raise AssertionError(f"penstock up ended with {stack.process.returncode}:\n" + "".join(stack.log))
        time.sleep(0.05)
    raise AssertionError("penstock up was not ready in time:\n" + "".join(stack.log))


def _read_engine_ports(stack: RunningStack) -> None:
    """Reads the addresses of the stack's Triton from the log: ports with ENGINE_PORTS, else Unix sockets."""
    for line in stack.logged(": engine process "):
        addresses = dict(re.findall(r" (http|grpc)=(\S+)", line))
        stack.engine_http_url, stack.engine_grpc_address = addresses["http"], addresses["grpc"]


def stop_stack(stack: RunningStack, timeout_s: float = 40.0) -> int:
    """SIGTERM; the exit code."""
    stack.process.terminate()
    return stack.process.wait(timeout_s)
