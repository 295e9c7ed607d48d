"""Tritons of the bench: prepared requests, model folders, processes."""

import json
import math
import os
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from loadtest.bench.child import Child
from loadtest.bench.wire import BadAnswer, BenchRequest
from penstock.engines.run_directory import ENGINE_ID_VARIABLE, reap
from penstock.engines.triton import launch as triton_launch
from penstock.engines.triton.endpoints import TritonListeners, pick_free_ports
from penstock.engines.triton.runtime import TritonRuntime
from penstock.engines.triton.supervisor import TritonOptions, triton_arguments
from penstock.gpu.mps.control import PIPE_DIRECTORY
from penstock_load.witness.process_cpu import CpuMeter

ADMIN_S = 60.0
_BYTES = {"TYPE_FP32": 4, "TYPE_FP16": 2, "TYPE_UINT8": 1, "TYPE_INT32": 4, "TYPE_INT64": 8}


@dataclass(frozen=True, slots=True)
class TensorFace:
    """An input or output without its batch dimension. row_bytes: of one row."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Face:
    """What a model takes and gives: one tensor each, their dims fixed."""

    input: TensorFace
    output: TensorFace
    has_batch: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A registered shared-memory region: input rows from 0, output rows behind them. kind: system or cuda."""

    name: str
    kind: str


def read_config(folder: Path) -> model_config_pb2.ModelConfig:
    """The model folder's config.pbtxt. Raises BadAnswer."""
    try:
        return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    except (OSError, text_format.ParseError) as error:
        raise BadAnswer(f"{folder} is no model folder: {error}") from error


def face_of(config: model_config_pb2.ModelConfig) -> Face:
    """Raises BadAnswer for more than one input, or dims that are free."""
    if len(config.input) != 1:
        raise BadAnswer(f"model {config.name!r} takes {len(config.input)} inputs; the bench asks models of one")
    return Face(_tensor(config.input[0]), _tensor(config.output[0]), config.max_batch_size > 0)


def _tensor(spec: "model_config_pb2.ModelInput | model_config_pb2.ModelOutput") -> TensorFace:
    datatype = model_config_pb2.DataType.Name(spec.data_type)
    if datatype not in _BYTES or min(spec.dims) < 1:
        raise BadAnswer(
            f"tensor {spec.name!r} is {datatype} {list(spec.dims)}; the bench takes numbers of a fixed shape"
        )
    row_bytes = math.prod(spec.dims) * _BYTES[datatype]
    return TensorFace(spec.name, datatype.removeprefix("TYPE_"), tuple(spec.dims), row_bytes)


def region_bytes(face: Face, rows: int) -> int:
    """How large a region for so many rows is."""
    return rows * (face.input.row_bytes + face.output.row_bytes)


def tensor_request(model: str, face: Face, region: Region, rows: int) -> bytes:
    """An inference of so many rows, in and out by the region."""
    in_bytes, out_bytes = rows * face.input.row_bytes, rows * face.output.row_bytes
    shape = [rows, *face.input.dims] if face.has_batch else list(face.input.dims)
    asked = {
        "inputs": [
            {"name": face.input.name, "datatype": face.input.datatype, "shape": shape}
            | {"parameters": _address(region, 0, in_bytes)}
        ],
        "outputs": [{"name": face.output.name, "parameters": _address(region, in_bytes, out_bytes)}],
    }
    return http_post(f"/v2/models/{model}/infer", json.dumps(asked).encode(), "application/json")


def _address(region: Region, offset: int, size_bytes: int) -> dict[str, object]:
    return {"shared_memory_region": region.name, "shared_memory_offset": offset, "shared_memory_byte_size": size_bytes}


def picture_request(model: str, picture: bytes) -> bytes:
    """A JPEG to the image endpoint."""
    return http_post(f"/v2/models/{model}/image", picture, "image/jpeg")


def http_post(path: str, body: bytes, media_type: str) -> bytes:
    """A whole HTTP/1.1 request."""
    return as_sent(BenchRequest(path, {"Content-Type": media_type}, body))


def as_sent(request: BenchRequest) -> bytes:
    """The request as it goes over a socket."""
    headers = {"Host": "localhost", "Content-Length": str(len(request.body))} | request.headers
    lines = [f"POST {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + request.body


def ask(port: int, path: str, body: object | None = None, *, timeout_s: float = ADMIN_S) -> bytes:
    """A call outside the measured stretches: GET, or POST where there is a body. Raises BadAnswer."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise BadAnswer(f"{path} answered {error.code}: {error.read()[:500].decode(errors='replace')}") from error
    except OSError as error:
        raise BadAnswer(f"{path} was not answered: {error}") from error


@dataclass(frozen=True, slots=True)
class Variant:
    """How a copy differs. instances: of the model. max_batch_size: its own, and of its CUDA graphs.

    buckets: sizes of the CUDA graphs; the backend's choice where empty. in_flight: batches of an instance.
    delay_us: that Triton's batcher waits for more requests. parameters: of the torch backend, more.
    """

    name: str
    instances: int = 1
    max_batch_size: int = 1
    has_dynamic_batching: bool = False
    buckets: tuple[int, ...] = ()
    in_flight: int = 1
    delay_us: int = 0
    parameters: tuple[tuple[str, str], ...] = ()


def write_variant(source: Path, repository: Path, variant: Variant, *, is_gpu: bool) -> None:
    """The copy's folder. A model without a batch dimension keeps it so. Raises OSError, BadAnswer."""
    config = read_config(source)
    folder = repository / variant.name
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.name not in ("config.pbtxt", "MODEL.md", "golden.json"):
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _link(path, copy)
    (folder / "config.pbtxt").write_text(text_format.MessageToString(_changed(config, variant, is_gpu=is_gpu)))


def _link(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy)
    except OSError:  # another file system
        copy.write_bytes(path.read_bytes())


def _changed(config: model_config_pb2.ModelConfig, variant: Variant, *, is_gpu: bool) -> model_config_pb2.ModelConfig:
    changed = model_config_pb2.ModelConfig()
    changed.CopyFrom(config)
    changed.name = variant.name
    changed.max_batch_size = variant.max_batch_size if config.max_batch_size else 0
    kind = model_config_pb2.ModelInstanceGroup
    del changed.instance_group[:]
    changed.instance_group.add(count=variant.instances, kind=kind.KIND_GPU if is_gpu else kind.KIND_CPU)
    changed.ClearField("dynamic_batching")
    changed.ClearField("model_warmup")
    for name in ("batch_owner", "batch-buckets", "batches-in-flight"):
        changed.parameters.pop(name, None)
    if variant.has_dynamic_batching and changed.max_batch_size:
        changed.dynamic_batching.SetInParent()
        changed.dynamic_batching.max_queue_delay_microseconds = variant.delay_us
    if variant.buckets and changed.max_batch_size:
        changed.parameters["batch-buckets"].string_value = ";".join(map(str, variant.buckets))
    if variant.in_flight > 1 and changed.backend == "torch":
        changed.parameters["batches-in-flight"].string_value = str(variant.in_flight)
    if changed.backend == "torch":
        for name, value in variant.parameters:
            changed.parameters[name].string_value = value
    return changed


STOP_S = 10.0
STUB_S = 300  # 94 interpreters that start at once on 16 cores are late by Triton's own 30 s
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
        self.port, self._grpc_port, self._metrics_port = pick_free_ports("127.0.0.1", 3)

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
        self._child = Child("Triton", command, self._folder / "triton.log", environ)
        return self

    def wait(self, models: Sequence[str], until_s: float) -> None:
        """Until every model is ready, or that moment of the monotonic clock. Raises BadAnswer with the log's end."""
        missing = list(models)

        def is_ready() -> bool:
            missing[:] = [model for model in missing if not self._is_ready(model)]
            self._raise_failures()
            return not missing

        try:
            self._child.wait(is_ready, until_s, 0.2)
        except BadAnswer as error:
            raise BadAnswer(
                f"{len(missing)} of {len(models)} models are not ready, {missing[0]} first: {error}"
            ) from None

    def meter(self) -> CpuMeter:
        """Of Triton and its models' processes."""
        return CpuMeter(psutil.Process(self._child.process.pid))

    def __exit__(self, *_: object) -> None:
        """Ends it and reaps what it leaves."""
        self._child.end(STOP_S)
        reap(self._engine_id, child_pid=self._child.process.pid)

    def _raise_failures(self) -> None:
        """BadAnswer with the first of the models that Triton has given up."""
        try:
            rows = json.loads(ask(self.port, "/v2/repository/index", {}, timeout_s=5.0))
        except BadAnswer:
            return  # it does not listen yet
        given_up = [row for row in rows if row.get("state") == "UNAVAILABLE" and row.get("reason")]
        if given_up:
            raise BadAnswer(
                f"Triton loaded {len(given_up)} of {len(rows)} models not, {given_up[0]['name']} first: "
                f"{given_up[0]['reason']}"
            )

    def _is_ready(self, model: str) -> bool:
        try:
            ask(self.port, f"/v2/models/{model}/ready", timeout_s=5.0)
        except BadAnswer:
            return False
        return True
