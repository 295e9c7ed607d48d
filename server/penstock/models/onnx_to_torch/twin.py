"""Converts an ONNX model of the repository to PyTorch, and checks it against ONNX Runtime in FP32 on the CPU."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from tritonclient.grpc import model_config_pb2

from penstock.engines.ort_serving.session import ORT_ERRORS, ort_error_text
from penstock.models.added_folder import ADDED_BY, TORCH_FILE, proto_text
from penstock.models.inspect.torch_session import torch_python
from penstock.models.onnx_to_torch.description import CannotDescribe, describe
from penstock.models.optimize.source import OptimizeError, SourceModel

MAX_DIFFERENCE = 1e-3  # of the largest value, in FP32: other kernels add in another order
LABELS = "labels.txt"
_BATCHES = (1, 3)
_TIMEOUT_S = 300.0
_PIXELS = 255.0
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from onnx_to_torch.program import run; run()"


@dataclass(frozen=True, slots=True)
class TorchTwin:
    """off: the largest difference from ONNX Runtime, of the largest value. torch: the version that converted it."""

    name: str
    off: float
    torch: str
    size_bytes: int


def make_twin(source: SourceModel, staged: Path, python: Path | None = None) -> TorchTwin:
    """Fills the folder of NAME-torch. python: one with torch. Raises OptimizeError, OSError; nothing is kept then."""
    python = python or torch_python()
    if python is None:
        raise OptimizeError("PyTorch is not installed here: `penstock setup triton --gpu` installs it")
    name = f"{source.name}-torch"
    out = staged / "1" / TORCH_FILE.name
    out.parent.mkdir()
    with tempfile.TemporaryDirectory(prefix="penstock-torch.") as folder:
        try:
            describe(source.path, Path(folder))
            _write_samples(source.path, Path(folder))
        except CannotDescribe as error:
            raise OptimizeError(f"model {source.name!r} is not converted: {error}") from error
        said = _convert(python, Path(folder), out)
    if "why" in said:
        raise OptimizeError(f"model {source.name!r} is not converted: no PyTorch equivalent for {said['why']}")
    if not said["off"] <= MAX_DIFFERENCE:
        raise OptimizeError(
            f"model {source.name!r} is not converted: its outputs differ by {said['off']:.1%} from ONNX Runtime's"
        )
    (staged / "config.pbtxt").write_text(config_of_twin(source.proto, name), encoding="utf-8")
    if (source.folder / LABELS).is_file():
        shutil.copyfile(source.folder / LABELS, staged / LABELS)
    twin = TorchTwin(name, float(said["off"]), str(said["torch"]), out.stat().st_size)
    (staged / "MODEL.md").write_text(_page(source, twin), encoding="utf-8")
    return twin


def config_of_twin(proto: model_config_pb2.ModelConfig, name: str) -> str:
    """The model's config for backend `torch`: without the settings that only ONNX Runtime uses."""
    twin = model_config_pb2.ModelConfig()
    twin.CopyFrom(proto)
    twin.name, twin.backend, twin.platform = name, "torch", ""
    twin.default_model_filename = TORCH_FILE.name
    twin.ClearField("optimization")
    twin.ClearField("model_warmup")
    for key in [key for key in twin.parameters if key.endswith("_thread_count") or key in _ONNX_PARAMETERS]:
        del twin.parameters[key]
    twin.parameters[ADDED_BY].string_value = "penstock models optimize --torch"
    twin.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = "no"
    return proto_text(twin)


_ONNX_PARAMETERS = ("precision", "cuda-graphs", "channels-last", "batch-buckets", "enable_mem_arena")


def _write_samples(path: Path, folder: Path) -> None:
    """samples.npz: noise of several batch sizes, and ONNX Runtime's answers. Raises OptimizeError."""
    graph = json.loads((folder / "graph.json").read_text())
    drawn = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    try:
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        batches: Sequence[int] = _BATCHES if graph["has_free_rows"] else (graph["samples"][0][1][0],)
        for number, rows in enumerate(batches):
            inputs = [_noise(drawn, dtype, [rows, *shape[1:]]) for dtype, shape in graph["samples"]]
            answers = session.run(graph["outputs"], dict(zip(graph["inputs"], inputs, strict=True)))
            arrays |= {f"{number}.in.{place}": array for place, array in enumerate(inputs)}
            arrays |= {f"{number}.out.{place}": array for place, array in enumerate(answers)}
    except ORT_ERRORS as error:
        raise OptimizeError(f"ONNX Runtime does not run the model: {ort_error_text(error)}") from error
    np.savez(folder / "samples.npz", count=np.array(len(batches)), **arrays)


def _noise(drawn: np.random.Generator, dtype: str, shape: list[int]) -> Any:
    """Pixels of 0 to 255 in floats and bytes, 0 in other numbers."""
    values = drawn.random(shape) * _PIXELS
    return (values if dtype.startswith("float") or dtype == "uint8" else np.zeros(shape)).astype(dtype)


def _convert(python: Path, folder: Path, out: Path) -> dict[str, Any]:
    command = [str(python), "-I", "-c", _PROGRAM, str(Path(__file__).parents[1]), str(folder), str(out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OptimizeError(f"PyTorch had not converted the model after {_TIMEOUT_S:.0f} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OptimizeError(f"PyTorch ended without converting the model: {reason}")
    said: dict[str, Any] = json.loads(lines[-1])
    return said


def _page(source: SourceModel, twin: TorchTwin) -> str:
    return f"""\
# {twin.name}

The program of `{source.name}` for the backend `torch`, converted from its ONNX file by
`penstock models optimize {source.name} --torch` with PyTorch {twin.torch}.

On noise, its answers differ from ONNX Runtime's (FP32, CPU) by at most {twin.off:.1e} of the largest value.
On a GPU it runs in FP16 unless `precision` says otherwise, and checks fused calls when it loads.
"""
