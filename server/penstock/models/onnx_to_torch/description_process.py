"""The process that describes an ONNX file and runs it on samples: it limits itself, because the file may be hostile."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.models.inspect.facts import UnreadableModel
from penstock.models.inspect.inspection import Limits, checked_size, memory_limit_bytes
from penstock.models.onnx_to_torch.description import CannotDescribe
from penstock.process_limits import end_with_parent, limit_process

_BATCHES = (1, 3)
_PIXELS = 255.0
_MAX_REASON = 300  # characters of an unforeseen error
_SAMPLES_BYTES = 1 << 30  # of a file that is written, beside two times the model's size


def describe_in_process(path: Path, folder: Path, limits: Limits | None = None) -> None:
    """As describe_with_samples, in a limited process. Raises CannotDescribe, also if a limit ended it. Blocks."""
    limits = limits or Limits()
    numbers = (os.getpid(), limits.memory_bytes, limits.cpu_s)
    command = [sys.executable, "-P", "-m", __name__, str(path), str(folder), *map(str, numbers)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=limits.wall_s, check=False)
    except subprocess.TimeoutExpired:
        raise CannotDescribe(f"it could not be read and run within {limits.wall_s:g} s") from None
    try:
        problem = str(json.loads(done.stdout)["problem"])
    except (ValueError, TypeError, KeyError):
        how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"ended with {done.returncode}"
        memory_mib = limits.memory_bytes >> 20
        raise CannotDescribe(
            f"the process that read it {how}; its limits are {limits.cpu_s} s of CPU time, and {memory_mib} MiB plus "
            "eight times the file's size of memory"
        ) from None
    if problem:
        raise CannotDescribe(problem)


def describe_with_samples(path: Path, folder: Path) -> None:
    """Writes the description, and samples.npz: noise of several batch sizes, and ONNX Runtime's answers.

    Raises CannotDescribe, UnreadableModel, OSError, and errors of any type for a damaged file.
    """
    import onnxruntime as ort  # after the limits

    from penstock.engines.ort_serving.session import ORT_ERRORS, SEVERITY_FATAL, ort_error_text
    from penstock.models.inspect.onnx_file import read_facts
    from penstock.models.onnx_to_torch.description import describe

    if read_facts(path).file_format.is_torch:
        raise CannotDescribe("it is a PyTorch program already")
    describe(path, folder)
    graph = json.loads((folder / "graph.json").read_text())
    drawn, arrays = np.random.default_rng(0), dict[str, Any]()
    options = ort.SessionOptions()
    options.log_severity_level = SEVERITY_FATAL
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        batches: Sequence[int] = _BATCHES if graph["has_free_rows"] else (graph["samples"][0][1][0],)
        for number, rows in enumerate(batches):
            inputs = [_noise(drawn, dtype, [rows, *shape[1:]]) for dtype, shape in graph["samples"]]
            answers = session.run(graph["outputs"], dict(zip(graph["inputs"], inputs, strict=True)))
            _check_finite(graph["outputs"], answers)
            arrays |= {f"{number}.in.{place}": array for place, array in enumerate(inputs)}
            arrays |= {f"{number}.out.{place}": array for place, array in enumerate(answers)}
    except ORT_ERRORS as error:
        raise CannotDescribe(f"ONNX Runtime does not run the model: {ort_error_text(error)}") from error
    np.savez(folder / "samples.npz", count=np.array(len(batches)), **arrays)


def _check_finite(names: Sequence[str], answers: Sequence[Any]) -> None:
    """Raises CannotDescribe for an output that cannot be compared."""
    for name, answer in zip(names, answers, strict=True):
        if not isinstance(answer, np.ndarray) or answer.dtype.kind not in "biuf":
            raise CannotDescribe(f"its output {name!r} is not a tensor of numbers")
        if answer.size and not np.isfinite(answer).any():
            raise CannotDescribe(
                f"its output {name!r} has no finite value for random input, so its weights may be damaged"
            )


def _noise(drawn: np.random.Generator, dtype: str, shape: list[int]) -> Any:
    """Pixels of 0 to 255 in floats and bytes, 0 in other numbers."""
    values = drawn.random(shape) * _PIXELS
    return (values if dtype.startswith("float") or dtype == "uint8" else np.zeros(shape)).astype(dtype)


def problem_of(path: Path, folder: Path) -> str:
    """Describes the file; returns why that failed as one sentence, or ""."""
    try:
        describe_with_samples(path, folder)
    except (CannotDescribe, UnreadableModel) as error:
        return str(error)
    except (MemoryError, RecursionError):
        return f"{path} needs more memory than the limit"
    except Exception as error:  # noqa: BLE001 - the process's root
        return f"{path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON]}"
    return ""


def main(arguments: Sequence[str]) -> str:
    """Limits this process; then as problem_of. arguments: file, folder, parent's process id, memory, CPU time."""
    path, folder = Path(arguments[0]), Path(arguments[1])
    parent, memory_bytes, cpu_s = map(int, arguments[2:])
    end_with_parent(parent)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit fails with EFBIG instead
    limits = Limits(memory_bytes=memory_bytes, cpu_s=cpu_s)
    try:
        size_bytes = checked_size(path, limits)
    except UnreadableModel as error:
        return str(error)
    file_bytes = _SAMPLES_BYTES + 2 * size_bytes
    limit_process(memory_limit_bytes(limits, size_bytes), cpu_s=cpu_s, file_bytes=file_bytes)
    return problem_of(path, folder)


if __name__ == "__main__":
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the reply
    with reply:
        json.dump({"problem": main(sys.argv[1:])}, reply)
