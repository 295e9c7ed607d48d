"""Programs that the bench starts: raw execution, exports, MPS daemon, `penstock up`."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from loadtest.bench.child import CHECKOUT, Child
from loadtest.bench.wire import BadAnswer
from penstock.engines.triton import launch as triton_launch
from penstock.gpu.cards import ALL, choose_cards
from penstock.gpu.mps.control import LIMIT_VARIABLES, LOG_DIRECTORY, PIPE_DIRECTORY, VISIBLE_CARDS, daemon_listens
from penstock.gpu.mps.control import PROGRAM as CONTROL
from penstock.gpu.nvml import read_cards

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
        message = json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True))
        pipe = subprocess.PIPE
        self._workers = [
            subprocess.Popen(
                [*self._command, message], stdin=pipe, stdout=pipe, text=True, env=self._environ, cwd=CHECKOUT
            )
            for _ in range(self._count)
        ]

    def wait(self) -> None:
        """Until all are ready. Raises BadAnswer with what one says."""
        for worker in self._workers:
            said = self._answer(worker)
            if "why" in said:
                raise BadAnswer(f"the raw program does not run: {said['why']}")

    def run(self, count: int, order: Mapping[str, Any]) -> float:
        """The first so many of them, at once: rows a second, of all together."""
        for worker in self._workers[:count]:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(order) + "\n")
            worker.stdin.flush()
        answers = [self._answer(worker) for worker in self._workers[:count]]
        return float(sum(one["rows"] / one["seconds"] for one in answers))

    def _answer(self, worker: "subprocess.Popen[str]") -> dict[str, Any]:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise BadAnswer(f"a raw process ended with {worker.wait(STOP_S)}; what it said stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

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


@dataclass(frozen=True, slots=True)
class Export:
    """One model of deploy.models.resnet50_torch, in home's models/. flags: of that program."""

    home: Path
    name: str
    flags: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.home / "models" / self.name


def export_all(wanted: Sequence[Export], python: str) -> None:
    """Each by a process of its own, all at once; those that lie there already stay. Raises BadAnswer, OSError."""
    missing = [one for one in wanted if not (one.folder / "config.pbtxt").is_file()]
    if missing:
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(lambda one: _export(one, python), missing))


def _export(wanted: Export, python: str) -> None:
    program = (python, "-m", "deploy.models.resnet50_torch", "--home", str(wanted.home), "--name", wanted.name)
    done = subprocess.run([*program, *wanted.flags], capture_output=True, text=True, cwd=CHECKOUT)
    if done.returncode or not (wanted.folder / "config.pbtxt").is_file():
        raise BadAnswer(f"{' '.join(program[1:])} made no model: {done.stderr.strip()[-500:]}")


THREAD_PERCENTAGE, _ = LIMIT_VARIABLES
START_S, ASK_S, QUIT_S = 20.0, 10.0, 5


NO_TORCH = "no torch"


def python_with_torch(environment: Path) -> str:
    """The first interpreter that has it; this one, which will report it, if none has. environment: of Triton."""
    candidates = (sys.executable, str(environment / "bin" / "python"))
    return next((python for python in candidates if torch_version(python) != NO_TORCH), sys.executable)


def torch_version(python: str) -> str:
    """Of torch and cuDNN, as that interpreter has them."""
    ask = "import torch; print('torch', torch.__version__, 'cuDNN', torch.backends.cudnn.version())"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    except OSError:
        return NO_TORCH
    return done.stdout.strip() or NO_TORCH


class MpsDaemon:
    """A context: entered, the daemon takes clients that get `environ`."""

    def __init__(self, folder: Path, threads: int = 100) -> None:
        """folder: an empty one, its path short: a socket lies in it. threads: percent of a card's, for a client."""
        self.folder = folder
        self.environ = {PIPE_DIRECTORY: str(folder), LOG_DIRECTORY: str(folder)}
        if threads < 100:
            self.environ[THREAD_PERCENTAGE] = str(threads)

    def __enter__(self) -> Self:
        if shutil.which(CONTROL) is None:
            raise BadAnswer(f"{CONTROL} is not on PATH; it comes with NVIDIA's driver")
        environ = os.environ | self.environ
        self._child = Child(CONTROL, [CONTROL, "-f"], self.folder / "daemon.log", environ)
        try:
            self._child.wait(lambda: daemon_listens(self.folder), time.monotonic() + START_S, 0.05)
        except BadAnswer:
            self._child.end(0.0)
            raise
        return self

    def ask(self, command: str) -> str:
        """What the daemon says to it; empty where it does not."""
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [CONTROL], input=command + "\n", capture_output=True, text=True, timeout=ASK_S,
                env=os.environ | self.environ,
            )  # fmt: skip
            return done.stdout.strip() if done.returncode == 0 else ""
        return ""

    def client_pids(self) -> list[int]:
        """The processes that are attached now."""
        servers = [word for word in self.ask("get_server_list").split() if word.isdecimal()]
        clients = [self.ask(f"get_client_list {server}").split() for server in servers]
        return sorted({int(word) for words in clients for word in words if word.isdecimal()})

    def __exit__(self, *_: object) -> None:
        self.ask(f"quit -t {QUIT_S}")
        with suppress(subprocess.TimeoutExpired):
            self._child.process.wait(QUIT_S + 5)
        self._child.end(QUIT_S)


UP_STOP_S = 30.0
STUB, TRITON = "triton_python_backend_stub", "tritonserver"
CORE_PROCESS = "core"  # its last argument
_READY = re.compile(r"ready: REST (\S+)  gRPC (\S+)  metrics (\S+)")
_REFUSED = re.compile(r"^cannot serve .+$", re.MULTILINE)


def first_of_several_cards() -> str:
    """The UUID of the first card that CUDA sees, if it sees several; else empty."""
    cards = choose_cards(ALL, read_cards(), os.environ.get(VISIBLE_CARDS))
    return cards[0].uuid if len(cards) > 1 else ""


class PenstockUp:
    """A context: entered, the stack is starting; `wait` waits until it is ready."""

    def __init__(
        self, home: Path, models: Iterable[str], *flags: str, environment: Path | None, gpus: str = ""
    ) -> None:
        """home: the models are in its models/; its log goes there. environment: of Triton; None: embedded engine.
        gpus: as --gpus; empty for the first card, with Triton's own ports open."""
        self._home = home
        free = ["http", "grpc", "metrics"]
        free += [f"engine-{port}" for port in free] if environment is not None and not gpus else []
        ports = [word for port in free for word in (f"--{port}-port", "0")]
        if wanted := gpus or first_of_several_cards():
            ports += ["--gpus", wanted]
        places = ("--home", str(home), "--models", ",".join(models))
        engine: tuple[str, ...] = ("--engine", "embedded")
        if environment is not None:
            engine = ("--engine", "triton", "--engine-environment", str(environment))
        self._command = [
            *(sys.executable, "-I", "-S", triton_launch.__file__, str(os.getpid())),  # it dies with the bench
            *(sys.executable, "-m", "penstock.cli.main", "up", *places, *engine, *ports, "--console", "off", *flags),
        ]
        self._child: Child | None = None
        self.port = 0

    def __enter__(self) -> Self:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        kept.pop(PIPE_DIRECTORY, None)
        self._child = Child("penstock up", self._command, self._home / "up.log", kept)
        return self

    @property
    def child(self) -> Child:
        """The running stack."""
        assert self._child is not None, "it was entered"
        return self._child

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """Of the stack."""
        return self.child.process

    def wait(self, until_s: float) -> None:
        """Until it says that it is ready, or that moment of the monotonic clock.

        Raises BadAnswer with the log's end, or with the model that cannot be served and why.
        """
        self.child.wait(lambda: bool(_READY.search(self.child.text())), until_s)
        text = self.child.text()
        if refused := _REFUSED.search(text):
            raise BadAnswer(f"penstock up {refused[0]}")
        found = _READY.search(text)
        assert found is not None
        self.port = urlsplit(found[1]).port or 0

    def processes(self) -> list[psutil.Process]:
        """Its own and all descendants."""
        return self.child.family()

    def cpu_s(self) -> dict[str, float]:
        """Seconds so far, by kind: gateway (with its core), core, triton, model (its instances' processes)."""
        found = {"gateway": 0.0, "core": 0.0, "triton": 0.0, "model": 0.0}
        for process in self.processes():
            with suppress(psutil.Error):
                name, times, words = process.name(), process.cpu_times(), process.cmdline()
                kind = "triton" if name.startswith(TRITON) else "model" if STUB.startswith(name) else "gateway"
                found[kind] += times.user + times.system
                if words[-1:] == [CORE_PROCESS]:
                    found["core"] += times.user + times.system
        return found

    def __exit__(self, *_: object) -> None:
        self.child.end(UP_STOP_S)
