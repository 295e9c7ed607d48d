"""Makes a program of torch.export of a described ONNX graph, by a Python that has torch but neither Penstock nor onnx.

A folder has graph.json and constants.npz, as description.py writes them, and samples.npz: inputs and what ONNX Runtime
answers, of several batches.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .operators import OPERATORS, NotConverted

_MAX_SHAPE_NUMBERS = 64
# Constants behind the first input of these are numbers, not tensors.
_TAKES_NUMBERS = ("Clip", "Pad", "Pow", "Resize", "Upsample")
_MIN_MAGNITUDE = 1e-6
_PR_SET_PDEATHSIG = 1


class OnnxProgram(torch.nn.Module):  # type: ignore[misc]  # torch has no types where these are checked
    """The graph as a module. graph: inputs, outputs, nodes of {op, inputs, outputs, attributes}; "" is no input."""

    def __init__(self, graph: dict[str, Any], constants: dict[str, Any]) -> None:
        """Raises NotConverted for an operator that is not supported."""
        super().__init__()
        missing = sorted({node["op"] for node in graph["nodes"]} - OPERATORS.keys())
        if missing:
            raise NotConverted(f"the operator{'s' * (len(missing) > 1)} {', '.join(missing)}")
        self._graph = graph
        self._numbers: dict[str, Any] = {}
        self._small = {name: value.tolist() for name, value in constants.items() if value.size <= _MAX_SHAPE_NUMBERS}
        self._places: dict[str, str] = {}
        for number, (name, value) in enumerate(constants.items()):
            is_shape = value.dtype.kind in "iu" and value.ndim < 2 and name in self._small
            if is_shape or value.ndim == 0:
                self._numbers[name] = value.tolist()
            elif not value.size:  # an input that is left out, as Resize's roi
                self._numbers[name] = None
            else:
                self._places[name] = f"constant_{number}"
                self.register_buffer(self._places[name], torch.from_numpy(np.array(value)))

    def forward(self, *inputs: Any) -> Any:
        values: dict[str, Any] = {"": None, **self._numbers}
        values |= {name: getattr(self, place) for name, place in self._places.items()}
        values |= dict(zip(self._graph["inputs"], inputs, strict=True))
        for node in self._graph["nodes"]:
            attributes = {**node["attributes"], "outputs": len(node["outputs"])}
            given = [values[name] for name in node["inputs"]]
            if node["op"] in _TAKES_NUMBERS:
                given[1:] = [self._small.get(name, values[name]) for name in node["inputs"][1:]]
            answer = OPERATORS[node["op"]](attributes, given)
            several = answer if len(node["outputs"]) > 1 else [answer]
            values |= dict(zip(node["outputs"], several, strict=False))
        return tuple(values[name] for name in self._graph["outputs"])


def convert(folder: Path, out: Path) -> None:
    """Writes the program, with a dynamic first dimension if the graph has one. Raises NotConverted, torch's errors."""
    graph = json.loads((folder / "graph.json").read_text())
    with np.load(folder / "constants.npz") as file:
        constants = {name: file[str(place)] for place, name in enumerate(graph["constants"])}
    program = OnnxProgram(graph, constants).eval()
    rows = torch.export.Dim("rows", min=1, max=1024)
    samples = tuple(torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in graph["samples"])
    shapes = (tuple({0: rows} for _ in samples),) if graph["has_free_rows"] else None
    with torch.no_grad():
        exported = torch.export.export(program, samples, dynamic_shapes=shapes)
    torch.export.save(exported, out)


def largest_difference(folder: Path, program: Path) -> float:
    """Between the written program and the samples' answers, of the largest value; infinite for other shapes."""
    module = torch.export.load(program).module(check_guards=False)
    worst = 0.0
    with np.load(folder / "samples.npz") as file, torch.no_grad():
        for number in range(int(file["count"])):
            inputs = _listed(file, f"{number}.in.")
            answers = module(*(torch.from_numpy(one) for one in inputs))
            for right, answer in zip(_listed(file, f"{number}.out."), answers, strict=True):
                worst = max(worst, _difference(right.astype(np.float64), answer.double().numpy()))
    return worst


def _listed(file: Any, prefix: str) -> list[Any]:
    return [file[f"{prefix}{place}"] for place in range(sum(name.startswith(prefix) for name in file.files))]


def _difference(right: Any, answer: Any) -> float:
    if right.shape != answer.shape or not np.array_equal(np.isfinite(right), np.isfinite(answer)):
        return float("inf")
    known = np.isfinite(right)
    largest = max(float(np.abs(right[known]).max(initial=0.0)), _MIN_MAGNITUDE)
    return float(np.abs(right[known] - answer[known]).max(initial=0.0)) / largest


def _limit(parent: int, memory_bytes: int, cpu_s: int, file_bytes: int) -> None:
    """Ends this process with its parent, and at these limits; as penstock.process_limits, which is not here."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write over the limit fails with EFBIG instead
    limits = (resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, file_bytes)
    for limit, most in (*limits, (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def run() -> None:
    """argv: …, parent's process id, memory, CPU seconds, bytes of a file; a folder, the program's path.

    Writes JSON: {"largest_difference": largest difference, "torch": version} or {"why": …}.
    """
    folder, out = Path(sys.argv[-2]), Path(sys.argv[-1])
    _limit(*map(int, sys.argv[-6:-2]))
    torch.set_num_threads(2)
    try:
        convert(folder, out)
        result: dict[str, Any] = {
            "largest_difference": largest_difference(folder, out),
            "torch": str(torch.__version__),
        }
    except NotConverted as error:
        result = {"why": str(error)}
    except Exception as error:  # noqa: BLE001  the root of a process: errors of torch of any type
        result = {"why": (str(error).strip() or type(error).__name__).splitlines()[0]}
    sys.stdout.write(json.dumps(result) + "\n")
