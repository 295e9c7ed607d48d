"""Several requests in few runs: same-shaped requests share one, and a request that fails does so alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import RequestError

Arrays = dict[str, Any]  # name → ndarray
Run = Callable[[Sequence[str], Mapping[str, Any]], Sequence[Any]]  # (output names, inputs) → arrays in their order


@dataclass(frozen=True)
class Ask:
    """One request: its inputs by name, and the names of the outputs that it wants."""

    inputs: Arrays
    outputs: tuple[str, ...]


Outcome = Arrays | RequestError


class BatchRunner:
    """Answers lists of requests through `run`, which raises RequestError. Not thread-safe: one per model instance.

    `is_splittable` turns False for good when a merged run did not answer one row per row of input: from then on every
    request runs alone.
    """

    def __init__(self, run: Run, *, is_batching: bool) -> None:
        self._run = run
        self.is_splittable = is_batching

    def answer(self, asks: Sequence[Ask]) -> list[Outcome]:
        """One outcome per request, in order. What agrees in names, types and all dimensions but the first is
        concatenated; a merged run that fails is halved until the culprit stands alone."""
        outcomes: dict[int, Outcome] = {}
        for members in self._groups(asks):
            answers = self._answer_group([asks[i] for i in members])
            outcomes.update(zip(members, answers, strict=True))
        return [outcomes[i] for i in range(len(asks))]

    def _groups(self, asks: Sequence[Ask]) -> list[list[int]]:
        if len(asks) == 1 or not self.is_splittable:
            return [[i] for i in range(len(asks))]
        groups: dict[object, list[int]] = {}
        for i, ask in enumerate(asks):
            groups.setdefault(_merge_key(i, ask), []).append(i)
        return list(groups.values())

    def _answer_group(self, asks: Sequence[Ask]) -> list[Outcome]:
        if len(asks) == 1 or not self.is_splittable:
            return [self._answer_alone(ask) for ask in asks]
        merged = self._answer_merged(asks)
        if merged is not None:
            return merged
        half = len(asks) // 2
        return self._answer_group(asks[:half]) + self._answer_group(asks[half:])

    def _answer_alone(self, ask: Ask) -> Outcome:
        try:
            return dict(zip(ask.outputs, self._run(ask.outputs, ask.inputs), strict=True))
        except RequestError as error:
            return error

    def _answer_merged(self, asks: Sequence[Ask]) -> list[Outcome] | None:
        """None: the run failed, or its answer has other rows than the question."""
        names = tuple(dict.fromkeys(name for ask in asks for name in ask.outputs))
        inputs = {name: np.concatenate([ask.inputs[name] for ask in asks]) for name in asks[0].inputs}
        try:
            arrays = dict(zip(names, self._run(names, inputs), strict=True))
        except RequestError:
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


def _merge_key(index: int, ask: Ask) -> object:
    """Equal for requests that may share a run; one of its own for a request whose inputs disagree in their rows."""
    if len({array.shape[:1] for array in ask.inputs.values()}) != 1:
        return index
    return tuple(sorted((name, array.dtype.str, array.shape[1:]) for name, array in ask.inputs.items()))


def _row_count(ask: Ask) -> int:
    return int(next(iter(ask.inputs.values())).shape[0])
