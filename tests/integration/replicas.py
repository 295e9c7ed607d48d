"""Replicas of the gateway that are restarted in place, in the order in which the chart ends and starts a pod."""

import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from penstock.engines.run_directory import ENGINE_ID_VARIABLE, reap
from penstock.engines.triton.endpoints import TritonListeners, pick_free_ports
from penstock.engines.triton.runtime import find_triton
from penstock.engines.triton.supervisor import TritonOptions, triton_arguments
from tests.support.http import call
from tests.support.stack import CHECKOUT, RunningStack, start_stack, wait_until_ready
from tests.support.tiny_models import write_model
from tests.support.waiting import wait_for

EXIT_TIMEOUT_S = 5  # which Triton takes whole while its clients are connected
VALUES = CHECKOUT / "deploy" / "helm" / "penstock" / "values.yaml"
BRIGHTNESS = '''"""How bright pictures are, as the score of a class; writes down each that it is asked for."""
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            pixels = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            time.sleep(0.01)
            means = pixels.mean(axis=(1, 2, 3), dtype=np.float64).astype(np.float32)
            with open({ledger!r}, "a") as ledger:
                ledger.write("".join(f"{{mean:.2f}}\\n" for mean in means))
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.stack([means, 1 - means], axis=1))]))
        return answers
'''
BRIGHTNESS_CONFIG = """backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
parameters { key: "network-type" value { string_value: "1" } }
parameters { key: "net-scale-factor" value { string_value: "0.00392156862745098" } }
parameters { key: "labels" value { string_value: "bright;dark" } }
parameters { key: "topk" value { string_value: "2" } }
parameters { key: "canary" value { string_value: "off" } }
"""


@dataclass(frozen=True)
class Drain:
    """The chart's gateway.drain, divided: a restart of seconds instead of a minute."""

    pre_stop_s: float
    delay_s: float
    grace_s: float

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `penstock up`."""
        return ("--drain-delay-s", str(self.delay_s), "--grace-s", str(self.grace_s))


def chart_drain(divisor: float) -> Drain:
    """As values.yaml has it."""
    said = chart_values()["gateway"]["drain"]
    return Drain(said["preStopSeconds"] / divisor, said["delaySeconds"] / divisor, said["graceSeconds"] / divisor)


def chart_values() -> dict[str, Any]:
    """The chart's defaults."""
    values: dict[str, Any] = yaml.safe_load(VALUES.read_text())
    return values


@dataclass
class Replica:
    """A pod: its gateway, always on the same two ports. arguments: of `penstock up`, besides its ports."""

    folder: Path
    arguments: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    stack: RunningStack | None = None
    stop_seconds: dict[str, float] = field(default_factory=dict)  # from SIGTERM

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ports = pick_free_ports("127.0.0.1", 3)

    @property
    def addresses(self) -> tuple[str, str]:
        """HTTP and gRPC."""
        return f"127.0.0.1:{self.ports[0]}", f"127.0.0.1:{self.ports[1]}"

    @property
    def running(self) -> RunningStack:
        """Its present life."""
        assert self.stack is not None, "not begun yet"
        return self.stack

    def health(self, what: str) -> int:
        """The status of a probe; 0 where nothing listens."""
        try:
            return call("GET", f"http://{self.addresses[0]}/v2/health/{what}", timeout_s=5.0).status
        except OSError:
            return 0

    def begin(self) -> None:
        """Start everything; `await_ready` waits for it."""
        names = ("--http-port", "--grpc-port", "--metrics-port")
        own_ports = [word for pair in zip(names, map(str, self.ports), strict=True) for word in pair]
        home = self.folder / "home"
        self.stack = start_stack(home, *own_ports, *self.arguments, environ=self.environ, wait=False)

    def await_ready(self) -> None:
        """As the pod's readiness probe sees it."""
        wait_until_ready(self.running)
        wait_for(lambda: self.health("ready") == 200, 10, "ready")

    def end(self, drain: Drain) -> None:
        """preStop, SIGTERM, the drain's delay, at most the grace, exit 0: the kubelet's part."""
        process = self.running.process
        time.sleep(drain.pre_stop_s)  # the kubelet's own: nothing but time passes
        assert self.health("ready") == 200, "ready until SIGTERM"
        process.terminate()
        asked = time.monotonic()
        wait_for(lambda: self.health("ready") == 503, drain.delay_s, "ready is 503 at once")
        self.stop_seconds["not ready"] = time.monotonic() - asked
        assert self.health("live") == 200, "live while it drains"
        assert process.wait(drain.delay_s + drain.grace_s + 10) == 0, "".join(self.running.log[-30:])
        self.stop_seconds["ended"] = time.monotonic() - asked

    def kill(self) -> None:
        """What is left of it, if anything, and without a wait: SIGKILL, and SIGTERM for its Triton."""
        if self.stack is not None:
            self.stack.process.kill()

    def clean_up(self) -> None:
        """Return when all of it has ended."""
        if self.stack is not None:
            self.stack.process.wait(30)


@dataclass
class BareTriton:
    """One without a supervisor, always on the same three ports, with the model `brightness`."""

    folder: Path
    ports: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.ports = pick_free_ports("127.0.0.1", 3)
        source = BRIGHTNESS.format(ledger=str(self._ledger))
        write_model(self.folder / "models", "brightness", source, BRIGHTNESS_CONFIG)
        self._ledger.touch()

    @property
    def addresses(self) -> tuple[str, str]:
        """HTTP's URL, and gRPC's address."""
        return f"http://127.0.0.1:{self.ports[0]}", f"127.0.0.1:{self.ports[1]}"

    @property
    def _ledger(self) -> Path:
        return self.folder / "ledger"

    def computed(self) -> list[float]:
        """The brightness of each picture that it was asked for, in all its lives."""
        return [float(line) for line in self._ledger.read_text().split()]

    def begin(self) -> None:
        """Start it; its client waits until it is ready."""
        run_dir = self.folder / f"run-{time.monotonic_ns()}"
        run_dir.mkdir()
        launch = find_triton(environment=CHECKOUT / ".venv-triton", search_path="").prepare(run_dir)
        listeners = TritonListeners(run_dir, *self.ports)
        options = TritonOptions(
            *(self._engine_id, (self.folder / "models",), listeners, self.extra_args), exit_timeout_s=EXIT_TIMEOUT_S
        )
        with (self.folder / "triton.log").open("ab") as log:
            argv = [*launch.argv, *triton_arguments(options, launch.python_backends)]
            environ = launch.env | {ENGINE_ID_VARIABLE: self._engine_id}
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=environ, cwd=run_dir)

    def end(self) -> None:
        """SIGTERM, and it ends by itself; with what code is its own affair (2.51 dies of its clients at times)."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(40)

    def clean_up(self) -> None:
        """What is left of it, its models' processes and regions too: it may have ended without them."""
        reap(self._engine_id)
        if self.process is not None:
            self.process.wait(10)

    @property
    def _engine_id(self) -> str:
        return f"{self.ports[0]:012x}"


@dataclass
class SidecarReplica(Replica):
    """A pod of topology `sidecar`: a Triton beside the gateway, begun before it and ended after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.triton = BareTriton(self.folder)
        url, address = self.triton.addresses
        self.arguments += ("--engine", url, "--engine-grpc", address, "--models", "brightness")

    def computed(self) -> list[float]:
        """The brightness of each picture that its Triton was asked for, in all its lives."""
        return self.triton.computed()

    def begin(self) -> None:
        self.triton.begin()
        super().begin()

    def end(self, drain: Drain) -> None:
        """Then Triton, once the gateway is gone: a native sidecar."""
        super().end(drain)
        assert self.triton.process is not None
        assert self.triton.process.poll() is None, "Triton ends after the gateway"
        self.triton.end()

    def kill(self) -> None:
        super().kill()
        if self.triton.process is not None:
            self.triton.process.terminate()

    def clean_up(self) -> None:
        super().clean_up()
        self.triton.clean_up()
