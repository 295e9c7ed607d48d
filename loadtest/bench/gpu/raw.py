"""Processes that run the program raw, started once and driven lap by lap, as many of them as a lap asks for."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from loadtest.bench.wire import BadAnswer
from server.gpu.mps import PIPE_DIRECTORY

CHECKOUT = Path(__file__).resolve().parents[3]
STOP_S = 5.0


class RawWorkers:
    """A context: entered, they are loading; `wait` waits for them."""

    def __init__(self, python: str, folder: Path, count: int, environ: Mapping[str, str] | None = None) -> None:
        """folder: the model's, with the buckets that are to be run. environ: on top of this process's (MPS)."""
        self._command = [python, "-m", "loadtest.bench.gpu.raw_worker", str(folder)]
        self._count = count
        inherited = {name: value for name, value in os.environ.items() if name != PIPE_DIRECTORY}
        self._environ = inherited | dict(environ or {})
        self._workers: list[subprocess.Popen[str]] = []

    def start(self, config: model_config_pb2.ModelConfig) -> None:
        """Begins loading."""
        told = json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True))
        pipe = subprocess.PIPE
        self._workers = [
            subprocess.Popen(
                [*self._command, told], stdin=pipe, stdout=pipe, text=True, env=self._environ, cwd=CHECKOUT
            )
            for _ in range(self._count)
        ]

    def wait(self) -> None:
        """Until all are ready. Raises BadAnswer with what one says."""
        for worker in self._workers:
            said = self._answer(worker)
            if "why" in said:
                raise BadAnswer(f"the raw program does not run: {said['why']}")

    def lap(self, count: int, lap: Mapping[str, Any]) -> float:
        """The first so many of them, at once: rows a second, of all together."""
        for worker in self._workers[:count]:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(lap) + "\n")
            worker.stdin.flush()
        told = [self._answer(worker) for worker in self._workers[:count]]
        return float(sum(one["rows"] / one["seconds"] for one in told))

    def _answer(self, worker: "subprocess.Popen[str]") -> dict[str, Any]:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise BadAnswer(f"a raw process ended with {worker.wait(STOP_S)}; what it said stands above")
        told: dict[str, Any] = json.loads(line)
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            with suppress(BrokenPipeError):
                worker.stdin.close()
        until = time.monotonic() + STOP_S
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, until - time.monotonic()))
            if worker.poll() is None:
                worker.kill()
                worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
