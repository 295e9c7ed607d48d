"""`penstock up` as a child of the bench, over a repository of the bench's own; what its processes use, by kind."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psutil

from loadtest.bench.gpu.raw import CHECKOUT
from loadtest.bench.wire import BadAnswer
from server.backends import triton_launch
from server.gpu.mps import PIPE_DIRECTORY

STOP_S = 30.0
STUB, TRITON = "triton_python_backend_stub", "tritonserver"
_READY = re.compile(r"ready: REST (\S+)  gRPC (\S+)  metrics (\S+)")
_REFUSED = re.compile(r"^cannot serve .+$", re.MULTILINE)
_LOG_LINES = 15


class PenstockUp:
    """A context: entered, the stack is starting; `wait` waits until it is ready."""

    def __init__(self, home: Path, models: Iterable[str], *flags: str, environment: Path) -> None:
        """home: the models lie in its models/; its log goes there. environment: of Triton and its models."""
        self._home = home
        self._exit = ExitStack()
        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        engine_ports = ("--engine-http-port", "0", "--engine-grpc-port", "0", "--engine-metrics-port", "0")
        places = ("--home", str(home), "--models", ",".join(models))
        engine = ("--engine", "triton", "--engine-environment", str(environment))
        self._command = [
            *(sys.executable, "-I", "-S", triton_launch.__file__, str(os.getpid())),  # it dies with the bench
            *(sys.executable, "-m", "server.cli", "up", *places, *engine, *ports, *engine_ports, *flags),
        ]
        self.port = 0
        self.metrics_url = ""

    def __enter__(self) -> Self:
        self._home.mkdir(parents=True, exist_ok=True)
        log = self._exit.enter_context((self._home / "up.log").open("wb"))
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PENSTOCK_") and name != PIPE_DIRECTORY
        }
        self.process = subprocess.Popen(
            self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ, cwd=CHECKOUT,
            start_new_session=True,
        )  # fmt: skip
        return self

    def wait(self, until_s: float) -> None:
        """Until it says that it is ready, or that moment of the clock.

        Raises BadAnswer with the log's end, or with the model that cannot be served and why.
        """
        while True:
            text = (self._home / "up.log").read_text(errors="replace")
            if found := _READY.search(text):
                if refused := _REFUSED.search(text):
                    raise BadAnswer(f"penstock up {refused[0]}")
                self.port, self.metrics_url = urlsplit(found[1]).port or 0, found[3]
                return
            if self.process.poll() is not None or time.monotonic() > until_s:
                end = "\n".join(text.splitlines()[-_LOG_LINES:])
                raise BadAnswer(f"penstock up is not ready; its log ends:\n{end}")
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """Its own and all below it."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_s(self) -> dict[str, float]:
        """Seconds so far, by kind: gateway (fronts, core and decoders), triton, model (its instances' processes)."""
        found = {"gateway": 0.0, "triton": 0.0, "model": 0.0}
        for process in self.processes():
            with suppress(psutil.Error):
                name, times = process.name(), process.cpu_times()
                kind = "triton" if name.startswith(TRITON) else "model" if STUB.startswith(name) else "gateway"
                found[kind] += times.user + times.system
        return found

    def stub_of(self, model: str) -> psutil.Process:
        """The process of a model's one instance. Raises BadAnswer."""
        for process in self.processes():
            with suppress(psutil.Error):
                if STUB.startswith(process.name()) and any(f"{model}_" in word for word in process.cmdline()):
                    return process
        raise BadAnswer(f"no process of model {model} was found")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            for process in self.processes():
                with suppress(psutil.Error):
                    process.kill()
            self.process.wait()
        self._exit.close()
