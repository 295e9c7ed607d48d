"""Runs a PyTorch program on the CPU for the trial: in a limited process of the environment that has PyTorch."""

import contextlib
import math
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from penstock.engines.triton.runtime import default_environment
from penstock.models.inspect.facts import ModelFacts
from penstock.models.inspect.inspection import Limits, memory_limit_bytes
from penstock.models.inspect.torch_file import EXPORT, MAX_METADATA_BYTES
from penstock.models.inspect.trial_session import MAX_OUTPUT_BYTES, TrialFailed
from penstock.protocol.inference import Array

ENVIRONMENT = "PENSTOCK_ENGINE_ENVIRONMENT"
CODE_FLAG = "--allow-model-code"
NO_TORCH = "PyTorch is not installed here: run make gpu in a checkout (7 GB), else penstock setup triton --gpu (5 GB)"
NOT_SERVED = (
    "no engine here serves TorchScript: the backend torch serves programs of torch.export, and Triton's own backend "
    f"pytorch is not in its wheel; export the model to ONNX, or by {EXPORT}"
)
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")  # no secrets
_RUNNER = Path(__file__).with_name("torch_runner.py")
_KINDS = "biuf"  # of NumPy's types


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]


class _Message(msgspec.Struct):
    tensors: list[_Tensor] = []
    error: str = ""
    torch: str = ""


def torch_python() -> Path | None:
    """The Python that has PyTorch: of Triton's environment, or this one. None if neither has it."""
    stated = os.environ.get(ENVIRONMENT)
    home = Path(os.environ.get("PENSTOCK_HOME") or "~/.penstock")
    own = Path(sys.prefix)
    for environment in (Path(stated) if stated else default_environment(own, home), own):
        if any(environment.glob("lib/python3*/site-packages/torch/version.py")):
            return environment / "bin" / "python"
    return None


def torch_environment() -> dict[str, str]:
    """Variables of a process that runs PyTorch on a model's file: on the CPU, without secrets."""
    inherited = {name: value for name in _INHERITED if (value := os.environ.get(name)) is not None}
    return inherited | {"CUDA_VISIBLE_DEVICES": ""}


def why_not_run(facts: ModelFacts, *, allows_code: bool) -> str:
    """Why the file is not run here, for the user; empty if it can be, and for ONNX files."""
    if not facts.file_format.is_torch:
        return ""
    if not allows_code:
        return f"a PyTorch program can run any code here, so it was not run; {CODE_FLAG} allows it"
    if torch_python() is None:
        return f"it was not run, because {NO_TORCH}"
    return ""


class TorchSession:
    """As TrialSession, for a PyTorch program. The process ends with this object."""

    def __init__(self, facts: ModelFacts, limits: Limits | None = None) -> None:
        """Raises TrialFailed."""
        python, limits = torch_python(), limits or Limits()
        if python is None:
            raise TrialFailed(why_not_run(facts, allows_code=True))
        self._inputs = [tensor.name for tensor in facts.inputs]
        self._outputs = [tensor.name for tensor in facts.outputs]
        self._what = "PyTorch"
        numbers = (memory_limit_bytes(limits, facts.size_bytes), limits.cpu_s)
        self._process = subprocess.Popen(
            [python, "-I", "-B", str(_RUNNER), facts.path, facts.file_format.value, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=torch_environment() | {"OMP_NUM_THREADS": "1"},
        )
        timer = threading.Timer(limits.wall_s, self._process.kill)
        timer.daemon = True
        timer.start()
        self.close = weakref.finalize(self, _end, self._process, timer)
        self._what = f"PyTorch {self._receive('open').torch}"

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, as they are. Raises TrialFailed, also for an output that is not a tensor or is too large."""
        arrays = [np.ascontiguousarray(feed[name]) for name in self._inputs]
        header = msgspec.json.encode(_Message([_Tensor(array.dtype.str, array.shape) for array in arrays]))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _receive says how the process ended
            self._process.stdin.write(struct.pack("<I", len(header)) + header)
            for array in arrays:
                self._process.stdin.write(array.tobytes())
            self._process.stdin.flush()
        found = [self._tensor(one) for one in self._receive("run").tensors]
        names = self._outputs or [f"output{number}" for number in range(len(found))]
        if len(found) != len(names):
            raise TrialFailed(f"it declares {len(names)} outputs, but returned {len(found)}")
        return dict(zip(names, found, strict=True))

    def _receive(self, what: str) -> _Message:
        (length,) = struct.unpack("<I", self._read(4))
        if length > MAX_METADATA_BYTES:
            raise TrialFailed(f"the process that runs it sent a header of {length} bytes")
        try:
            message = msgspec.json.decode(self._read(length), type=_Message)
        except msgspec.DecodeError:
            raise TrialFailed("the process that runs it sent a malformed answer") from None
        if message.error:
            raise TrialFailed(f"{self._what} cannot {what} it: {message.error[:400]}")
        return message

    def _tensor(self, one: _Tensor) -> Array:
        try:
            dtype = np.dtype(one.dtype)
        except (TypeError, ValueError):
            dtype = np.dtype(object)
        size_bytes = math.prod(one.shape) * dtype.itemsize
        if dtype.kind not in _KINDS or min(one.shape, default=0) < 0:
            raise TrialFailed("an output is not a tensor of numbers")
        if size_bytes > MAX_OUTPUT_BYTES:
            raise TrialFailed(f"an output has {size_bytes} bytes for one picture (limit {MAX_OUTPUT_BYTES})")
        return np.frombuffer(self._read(size_bytes), dtype).reshape(one.shape)

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(count)
        if len(data) < count:
            code = self._process.wait()
            raise TrialFailed(
                f"the process that runs it ended with exit code {code}, perhaps for lack of memory or time"
            )
        return data


def _end(process: subprocess.Popen[bytes], timer: threading.Timer) -> None:
    timer.cancel()
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
