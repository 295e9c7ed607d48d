"""Programs that the bench starts: raw execution, exports, MPS daemon, perf_analyzer, `penstock up`."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2

from loadtest.bench.wire import BadAnswer
from penstock.engines.triton import launch as triton_launch
from penstock.engines.triton.runtime import TritonRuntime
from penstock.gpu.mps.control import LIMIT_VARIABLES, LOG_DIRECTORY, PIPE_DIRECTORY, daemon_listens
from penstock.gpu.mps.control import PROGRAM as CONTROL

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
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "daemon.log").open("wb") as log:
            self.process = subprocess.Popen(
                [CONTROL, "-f"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | self.environ
            )
        until = time.monotonic() + START_S
        while not daemon_listens(self.folder):
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                self.process.wait()
                raise BadAnswer(f"{CONTROL} does not answer: {(self.folder / 'daemon.log').read_text()[-500:]}")
            time.sleep(0.05)
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
            self.process.wait(QUIT_S + 5)
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(QUIT_S)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


TIMEOUT_S, WINDOW_MS, WINDOWS = 30.0, 1000, 3
STABLE_PERCENT = 50  # it is asked for a figure, not for a proof
# It is linked against these; Triton's wheel has them under names with a hash.
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


def find_perf_analyzer() -> Path | None:
    """The program, or None if it is not installed."""
    named = os.environ.get("PENSTOCK_PERF_ANALYZER")
    program = Path(named) if named else CHECKOUT / ".venv-clients" / "bin" / "perf_analyzer"
    return program if os.access(program, os.X_OK) else None


def perf_analyzer_rate(runtime: TritonRuntime, folder: Path, port: int, model: str, callers: int) -> str:
    """What it says, "5,460 inferences/s", or why it says nothing. folder: for links to the libraries that it wants."""
    program = find_perf_analyzer()
    if program is None:
        return "perf_analyzer is not here"
    command = [
        *(str(program), "-m", model, "-u", f"127.0.0.1:{port}", "-i", "http", "--concurrency-range", str(callers)),
        *("--shared-memory", "system", "--output-shared-memory-size", "8192", "-s", str(STABLE_PERCENT)),
        *("--measurement-interval", str(WINDOW_MS), "--max-trials", str(WINDOWS)),
    ]
    environ = {"PATH": os.environ.get("PATH", ""), "LD_LIBRARY_PATH": str(_libraries(runtime, folder))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"perf_analyzer did not end well: {error}"
    return rate_text(done.stdout) or f"perf_analyzer said nothing of a rate: {done.stderr.strip()[-200:]}"


def rate_text(output: str) -> str:
    """The throughput that its report ends with; empty where there is none."""
    found = re.findall(r"Throughput: ([\d.]+) infer/sec", output)
    return f"{float(found[-1]):,.0f} inferences/s" if found else ""


def _libraries(runtime: TritonRuntime, folder: Path) -> Path:
    links = folder / "perf-analyzer-libraries"
    links.mkdir(parents=True, exist_ok=True)
    if runtime.wheel is not None:
        for name, pattern in _LIBRARIES.items():
            for found in runtime.wheel.libraries.glob(pattern):
                (links / name).unlink(missing_ok=True)
                (links / name).symlink_to(found)
    return links


UP_STOP_S = 30.0
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
            *(sys.executable, "-m", "penstock.cli.main", "up", *places, *engine, *ports, *engine_ports, *flags),
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
            self.process.wait(UP_STOP_S)
        except subprocess.TimeoutExpired:
            for process in self.processes():
                with suppress(psutil.Error):
                    process.kill()
            self.process.wait()
        self._exit.close()
