"""Tritons of the bench's own, without a gateway: as many as wanted, under an MPS daemon or not."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import psutil

from loadtest.bench.gpu.requests import ask
from loadtest.bench.wire import BadAnswer
from loadtest.witness.process_cpu import CpuMeter
from server.backends import triton_launch
from server.backends.reaper import ENGINE_ID_VARIABLE, reap
from server.backends.triton_listeners import TritonListeners
from server.backends.triton_ports import pick_free_ports
from server.backends.triton_process import TritonOptions, triton_arguments
from server.backends.triton_runtime import TritonRuntime
from server.gpu.mps import PIPE_DIRECTORY

STOP_S = 10.0
STUB_S = 300  # 94 interpreters that start at once on 16 cores are late by Triton's own 30 s
_LOG_LINES = 12
_LOADS_AT_ONCE = 64


class BenchTriton:
    """A context: entered, Triton is being started and loads every model of its repository; `wait` waits for them."""

    def __init__(
        self, runtime: TritonRuntime, repository: Path, folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        """folder: an empty one for its backends and log. environ: on top of this process's (MPS)."""
        self._runtime, self._repository, self._folder = runtime, repository, folder
        self._environ = dict(environ or {})
        self._engine_id = uuid.uuid4().hex[:12]
        self._exit = ExitStack()
        self.port, self._grpc_port, self._metrics_port = pick_free_ports("127.0.0.1", 3)
        self.log = folder / "triton.log"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name != PIPE_DIRECTORY}
        launch = self._runtime.prepare(self._folder, inherited | self._environ)
        options = TritonOptions(
            engine_id=self._engine_id,
            repositories=(self._repository,),
            listeners=TritonListeners(self._folder, self.port, self._grpc_port, self._metrics_port),
            http_threads=8,
            extra_args=(
                *("--load-model", "*", "--exit-on-error", "false", "--allow-gpu-metrics", "false"),
                *("--model-load-thread-count", str(_LOADS_AT_ONCE)),
                *(f"--backend-config={name},stub-timeout-seconds={STUB_S}" for name in launch.python_backends),
            ),
        )
        arguments = [*launch.argv, *triton_arguments(options, launch.python_backends)]
        command = [sys.executable, "-I", "-S", triton_launch.__file__, str(os.getpid()), *arguments]
        environ = dict(launch.env) | {ENGINE_ID_VARIABLE: self._engine_id}
        environ[triton_launch.LIBRARY_PATH_VARIABLE] = environ.pop("LD_LIBRARY_PATH", "")
        log = self._exit.enter_context(self.log.open("wb"))
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
        )
        return self

    def wait(self, models: Sequence[str], until_s: float) -> None:
        """Until every model is ready, or that moment of the monotonic clock. Raises BadAnswer with the log's end."""
        missing = list(models)
        while missing:
            if self.process.poll() is not None:
                raise BadAnswer(f"Triton ended with {self.process.returncode}; its log ends:\n{self._log_end()}")
            if time.monotonic() > until_s:
                raise BadAnswer(
                    f"{len(missing)} of {len(models)} models are not ready, {missing[0]} first; "
                    f"Triton's log ends:\n{self._log_end()}"
                )
            missing = [model for model in missing if not self._is_ready(model)]
            self._raise_failures()
            if missing:
                time.sleep(0.2)

    def meter(self) -> CpuMeter:
        """Of Triton and its models' processes."""
        return CpuMeter(psutil.Process(self.process.pid))

    def __exit__(self, *_: object) -> None:
        """Ends it and reaps what it leaves."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        reap(self._engine_id, child_pid=self.process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._exit.close()

    def _raise_failures(self) -> None:
        """BadAnswer with the first of the models that Triton has given up."""
        try:
            told = json.loads(ask(self.port, "/v2/repository/index", {}, timeout_s=5.0))
        except BadAnswer:
            return  # it does not listen yet
        given_up = [row for row in told if row.get("state") == "UNAVAILABLE" and row.get("reason")]
        if given_up:
            raise BadAnswer(
                f"Triton loaded {len(given_up)} of {len(told)} models not, {given_up[0]['name']} first: "
                f"{given_up[0]['reason']}"
            )

    def _is_ready(self, model: str) -> bool:
        try:
            ask(self.port, f"/v2/models/{model}/ready", timeout_s=5.0)
        except BadAnswer:
            return False
        return True

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if line[:1] in "EW" or "rror" in line]
        return "\n".join((telling or lines)[-_LOG_LINES:])
