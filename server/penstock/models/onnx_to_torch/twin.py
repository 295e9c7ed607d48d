"""Converts an ONNX model of the repository to PyTorch, and checks it against ONNX Runtime in FP32 on the CPU."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from penstock.models.added_folder import ADDED_BY, TORCH_FILE, proto_text
from penstock.models.inspect.inspection import Limits, memory_limit_bytes
from penstock.models.inspect.torch_session import NO_TORCH, torch_environment, torch_python
from penstock.models.onnx_to_torch.description import CannotDescribe
from penstock.models.onnx_to_torch.description_process import describe_in_process
from penstock.models.optimize.report import OPTIMIZED_BY
from penstock.models.optimize.source import OptimizeError, SourceModel

MAX_DIFFERENCE = 1e-3  # of the largest value, in FP32: other kernels add in another order
LABELS = "labels.txt"
_TIMEOUT_S, _CPU_S = 300.0, 600
_PROGRAM_BYTES = 64 << 20  # of the program, beside two times the ONNX file's size
_MAX_REASON = 300  # characters
Describe = Callable[[Path, Path], None]  # (ONNX file, folder); raises CannotDescribe
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from onnx_to_torch.program import run; run()"


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """largest_difference: from ONNX Runtime, relative to the largest value. torch: version that converted it."""

    name: str
    largest_difference: float
    torch: str
    size_bytes: int


def convert_model(
    source: SourceModel, staged: Path, python: Path | None = None, *, describe: Describe = describe_in_process
) -> ConvertedModel:
    """Fills the folder of NAME-torch. python: one with torch. describe: in a limited process by default.

    Raises OptimizeError, OSError; nothing is kept then.
    """
    python = python or torch_python()
    if python is None:
        raise OptimizeError(NO_TORCH)
    name = f"{source.name}-torch"
    out = staged / "1" / TORCH_FILE.name
    out.parent.mkdir()
    with tempfile.TemporaryDirectory(prefix="penstock-torch.") as folder:
        try:
            describe(source.path, Path(folder))
        except CannotDescribe as error:
            raise OptimizeError(f"model {source.name!r} is not converted: {error}") from error
        result = _convert(python, Path(folder), out, source.path.stat().st_size)
    if "why" in result:
        raise OptimizeError(f"model {source.name!r} is not converted: no PyTorch equivalent for {result['why']}")
    difference = float(result["largest_difference"])
    if not difference <= MAX_DIFFERENCE:
        raise OptimizeError(
            f"model {source.name!r} is not converted: its outputs differ by {difference:.1%} from ONNX Runtime's"
        )
    (staged / "config.pbtxt").write_text(torch_config(source.proto, name), encoding="utf-8")
    if (source.folder / LABELS).is_file():
        shutil.copyfile(source.folder / LABELS, staged / LABELS)
    twin = ConvertedModel(name, difference, str(result["torch"]), out.stat().st_size)
    (staged / "MODEL.md").write_text(_page(source, twin), encoding="utf-8")
    return twin


def torch_config(proto: model_config_pb2.ModelConfig, name: str) -> str:
    """The model's config for backend `torch`: without the settings that only ONNX Runtime uses."""
    twin = model_config_pb2.ModelConfig()
    twin.CopyFrom(proto)
    twin.name, twin.backend, twin.platform = name, "torch", ""
    twin.default_model_filename = TORCH_FILE.name
    twin.ClearField("optimization")
    twin.ClearField("model_warmup")
    for key in [key for key in twin.parameters if key.endswith("_thread_count") or key in _ONNX_PARAMETERS]:
        del twin.parameters[key]
    twin.parameters[ADDED_BY].string_value = f"{OPTIMIZED_BY} --torch"
    twin.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = "no"
    return proto_text(twin)


_ONNX_PARAMETERS = ("precision", "cuda-graphs", "channels-last", "batch-buckets", "enable_mem_arena")


def _convert(python: Path, folder: Path, out: Path, size_bytes: int) -> dict[str, Any]:
    """size_bytes: of the ONNX file."""
    limits = Limits()
    memory_bytes = memory_limit_bytes(limits, size_bytes)
    numbers = (os.getpid(), memory_bytes, _CPU_S, 2 * size_bytes + _PROGRAM_BYTES)
    package = str(Path(__file__).parents[1])
    command = [str(python), "-I", "-c", _PROGRAM, package, *map(str, numbers), str(folder), str(out)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            env=torch_environment(),
        )
    except subprocess.TimeoutExpired:
        raise OptimizeError(f"PyTorch had not converted the model after {_TIMEOUT_S:.0f} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:_MAX_REASON]
        limit = f"its limits are {memory_bytes >> 20} MiB of memory and {_CPU_S} s of CPU time"
        raise OptimizeError(f"PyTorch ended without converting the model: {reason}; {limit}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _page(source: SourceModel, twin: ConvertedModel) -> str:
    return f"""\
# {twin.name}

The program of `{source.name}` for the backend `torch`, converted from its ONNX file by
`penstock models optimize {source.name} --torch` with PyTorch {twin.torch}.

For random input, its outputs differ from ONNX Runtime's (FP32, CPU) by at most {twin.largest_difference:.1e} of the
largest value.
On a GPU it runs in FP16 unless `precision` says otherwise, and checks fused calls when it loads.
"""
