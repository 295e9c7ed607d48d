"""Merges requests of the same shape into one run, and checks whether a graph allows that.

`python -m penstock.engines.ort_serving.batch model.onnx` prints why the outputs lack a batch dimension, or nothing. The
gateway runs it as a process, because model files are untrusted.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .config import Config, OrtLoadError, OrtRequestError
from .device_tensor import stacked
from .session import SEVERITY_FATAL, new_options, open_for_reading, open_session

Arrays = dict[str, Any]  # name → ndarray
Run = Callable[[Sequence[str], Mapping[str, Any]], Sequence[Any]]  # (output names, inputs) → arrays in their order


@dataclass(frozen=True)
class OrtRequest:
    """One request: inputs by name, and the names of the requested outputs."""

    inputs: Arrays
    outputs: tuple[str, ...]


Outcome = Arrays | OrtRequestError


class BatchRunner:
    """Answers lists of requests through `run`. One per instance; not thread-safe.

    is_splittable becomes False for good if a merged run does not return one row per input row.
    """

    def __init__(self, run: Run, *, is_batching: bool) -> None:
        self._run = run
        self.is_splittable = is_batching

    def answer(self, asks: Sequence[OrtRequest]) -> list[Outcome]:
        """One outcome per request, in order. Merges requests of the same shape; bisects a failing run."""
        outcomes: dict[int, Outcome] = {}
        for members in self._groups(asks):
            answers = self._answer_group([asks[i] for i in members])
            outcomes.update(zip(members, answers, strict=True))
        return [outcomes[i] for i in range(len(asks))]

    def _groups(self, asks: Sequence[OrtRequest]) -> list[list[int]]:
        if len(asks) == 1 or not self.is_splittable:
            return [[i] for i in range(len(asks))]
        groups: dict[object, list[int]] = {}
        for i, ask in enumerate(asks):
            groups.setdefault(_merge_key(i, ask), []).append(i)
        return list(groups.values())

    def _answer_group(self, asks: Sequence[OrtRequest]) -> list[Outcome]:
        if len(asks) == 1 or not self.is_splittable:
            return [self._answer_alone(ask) for ask in asks]
        merged = self._answer_merged(asks)
        if merged is not None:
            return merged
        half = len(asks) // 2
        return self._answer_group(asks[:half]) + self._answer_group(asks[half:])

    def _answer_alone(self, ask: OrtRequest) -> Outcome:
        try:
            return dict(zip(ask.outputs, self._run(ask.outputs, ask.inputs), strict=True))
        except OrtRequestError as error:
            return error

    def _answer_merged(self, asks: Sequence[OrtRequest]) -> list[Outcome] | None:
        """None if the run failed or returned a different number of rows."""
        names = tuple(dict.fromkeys(name for ask in asks for name in ask.outputs))
        inputs = {name: stacked([ask.inputs[name] for ask in asks]) for name in asks[0].inputs}
        try:
            arrays = dict(zip(names, self._run(names, inputs), strict=True))
        except OrtRequestError:
            return None
        ends = np.cumsum([_row_count(ask) for ask in asks]).tolist()
        if any(array.shape[:1] != (ends[-1],) for array in arrays.values()):
            self.is_splittable = False
            return None
        starts = [0, *ends[:-1]]
        return [
            {name: arrays[name][start:end] for name in ask.outputs}
            for ask, start, end in zip(asks, starts, ends, strict=True)
        ]


def _merge_key(index: int, ask: OrtRequest) -> object:
    """Equal for requests that may share a run; unique for a request with inconsistent rows."""
    if len({array.shape[:1] for array in ask.inputs.values()}) != 1:
        return index
    return tuple(sorted((name, array.dtype.str, array.shape[1:]) for name, array in ask.inputs.items()))


def _row_count(ask: OrtRequest) -> int:
    return int(next(iter(ask.inputs.values())).shape[0])


_BATCH = 5  # a size that few models have as a fixed dimension


def missing_batch_dimension(path: Path, config: Config) -> str:
    """Why the outputs do not follow the inputs' batch dimension; empty if they do. Raises OrtLoadError."""
    first_dims = {node.name: node.shape[0] if node.shape else 1 for node in open_for_reading(path, config).get_inputs()}
    for name, dim in first_dims.items():
        if not isinstance(dim, str):
            return f"the first dimension of input '{name}' has no name in the ONNX file"
    options = new_options(config)
    options.log_severity_level = SEVERITY_FATAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC  # folds computed shapes
    options.add_session_config_entry("session.disable_prepacking", "1")
    for dim in set(first_dims.values()):
        options.add_free_dimension_override_by_name(dim, _BATCH)
    try:
        outputs = open_session(path, options, ["CPUExecutionProvider"]).get_outputs()
    except OrtLoadError as error:
        return f"the ONNX file takes no batch of {_BATCH}: {error}"
    lost = [node.name for node in outputs if not node.shape or node.shape[0] != _BATCH]
    return f"the ONNX file does not say that output '{lost[0]}' has a row for each row of its inputs" if lost else ""


def main() -> None:
    """Prints the reason, or nothing."""
    try:
        sentence = missing_batch_dimension(Path(sys.argv[1]), {})
    except OrtLoadError as error:
        sentence = str(error)
    sys.stdout.write(sentence)


if __name__ == "__main__":
    main()
