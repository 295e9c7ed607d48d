"""A real Triton over a generated repository of tiny ONNX models, for the tests of the onnxruntime backend."""

import contextlib
import dataclasses
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import TensorProto

from penstock.engines.triton.endpoints import pick_free_ports
from penstock.engines.triton.runtime import Launch
from tests.engines import onnx_models

READY_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 30.0

CONFIG = """backend: "onnxruntime"
max_batch_size: {max_batch_size}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
{rest}
"""
X_AND_Y = """input [ {{ name: "x" data_type: {data_type} dims: {dims} }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 3 ] }} ]
"""
ONLY_INPUTS = """input [ { name: "a" data_type: TYPE_FP32 dims: [ 3 ] } ]
input [ { name: "b" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
IN_FOURS = """dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 5000000 }
input [ { name: "index" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "value" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
SEQUENCES = """sequence_batching {
  control_input [ { name: "start" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]
}
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
SLOW = """input [ { name: "trips" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "done" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""


PICTURES = """input [ { name: "x" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] } ]
parameters { key: "image-decoder" value { string_value: "engine" } }
parameters { key: "infer-dims" value { string_value: "3;8;8" } }
"""


@dataclass(frozen=True)
class RunningTriton:
    """Its addresses and its log so far."""

    http_url: str
    grpc_address: str
    metrics_url: str
    log_path: Path

    def log(self) -> str:
        """Everything that Triton and its stubs have written."""
        return self.log_path.read_text(errors="replace")

    def reason(self, model_name: str) -> str:
        """Why a model is not served, as the repository index says it."""
        request = urllib.request.Request(f"{self.http_url}/v2/repository/index", data=b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            index: list[dict[str, Any]] = json.load(answer)
        return " ".join(str(row.get("reason", "")) for row in index if row["name"] == model_name)


def write_repository(repository: Path) -> None:
    """The models that load, and `broken_…`, each of which cannot for a reason of its own."""
    save = onnx_models.save
    save(onnx_models.add_and_multiply(), repository, "no_config")
    save(onnx_models.add_and_multiply(), repository, "only_inputs", config=_config(ONLY_INPUTS, max_batch_size=2))
    save(onnx_models.identities(), repository, "types", config=_config())
    save(onnx_models.lookup(), repository, "lookup", config=_config(IN_FOURS, max_batch_size=8))
    save(onnx_models.running_total(), repository, "sequences", config=_config(SEQUENCES, max_batch_size=4))
    save(onnx_models.slow(), repository, "slow", config=_config(SLOW, max_batch_size=1))
    _write_broken_models(repository)


def _write_broken_models(repository: Path) -> None:
    identity, save = onnx_models.identity, onnx_models.save
    wrong_type = _config(_x_and_y(data_type="TYPE_INT32"), max_batch_size=8)
    wrong_dims = _config(_x_and_y(dims="[ 4 ]"), max_batch_size=8)
    bfloat16 = identity(elem_type=TensorProto.BFLOAT16)
    save(identity(), repository, "broken_datatype", config=wrong_type)
    save(identity(), repository, "broken_dims", config=wrong_dims)
    save(bfloat16, repository, "broken_bfloat16", config=_config())
    save(identity((1, 3)), repository, "broken_batch", config=_config(max_batch_size=8))
    save(identity(("N", 3, 8, 8)), repository, "broken_pictures", config=_config(PICTURES, max_batch_size=8))
    for name in ("broken_file", "broken_absent"):
        save(identity(), repository, name, config=_config())
    (repository / "broken_file" / "1" / "model.onnx").write_bytes(b"this is no ONNX file")
    (repository / "broken_absent" / "1" / "model.onnx").unlink()


def _config(rest: str = "", *, max_batch_size: int = 0) -> str:
    return CONFIG.format(rest=rest, max_batch_size=max_batch_size)


def _x_and_y(*, data_type: str = "TYPE_FP32", dims: str = "[ 3 ]") -> str:
    return X_AND_Y.format(data_type=data_type, dims=dims)


@contextlib.contextmanager
def running_triton(
    launch: Launch, models: Path, folder: Path, *, ready_timeout_s: float = READY_TIMEOUT_S
) -> Iterator[RunningTriton]:
    """Triton with every model of `models` loaded as far as it can be; `folder` takes its log and is where it works."""
    ports = pick_free_ports("127.0.0.1", 3)
    triton = RunningTriton(
        f"http://127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", f"http://127.0.0.1:{ports[2]}", folder / "triton.log"
    )
    command = [*launch.argv, *_arguments(models, ports)]
    with triton.log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=launch.env)
    try:
        _wait_until_live(triton, process, ready_timeout_s)
        yield triton
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def launch_with(launch: Launch, environment: Path) -> Launch:
    """The same Triton, its models run by the Python of another virtual environment."""
    env = {"PATH": f"{environment / 'bin'}:{launch.env['PATH']}", "VIRTUAL_ENV": str(environment)}
    return dataclasses.replace(launch, env={**launch.env, **env})


def _arguments(models: Path, ports: tuple[int, ...]) -> list[str]:
    addresses = zip(("http", "grpc", "metrics"), ports, strict=True)
    listening = [flag for name, port in addresses for flag in (f"--{name}-port={port}", f"--{name}-address=127.0.0.1")]
    loading = ["--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false"]
    loading.append("--exit-timeout-secs=5")  # a reload that failed leaves 2.51 a model that it waits for, to the end
    return [f"--model-repository={models}", *listening, *loading, "--metrics-interval-ms=100"]


def _wait_until_live(triton: RunningTriton, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        assert process.poll() is None, f"Triton ended with {process.returncode}:\n{triton.log()[-4000:]}"
        try:
            with urllib.request.urlopen(f"{triton.http_url}/v2/health/live", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError(f"Triton was not live within {timeout_s} s:\n{triton.log()[-4000:]}")
