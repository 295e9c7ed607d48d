"""Runs the rows of a trial in an instance: numpy in, numpy out. See row_trial."""

from collections.abc import Callable
from typing import Any

import torch

from .config import EngineSpec
from .dtypes import WIRE_TYPES
from .errors import RequestError
from .instance import Ask, Instance


def array_runner(instance: Instance, spec: EngineSpec) -> Callable[[dict[str, Any]], dict[str, Any] | str]:
    """A function from inputs by name to outputs by name, or to the reason why the run failed."""

    def run(inputs: dict[str, Any]) -> dict[str, Any] | str:
        try:
            (outcome,) = instance.answer([_ask(inputs, spec)])
        except (RuntimeError, ValueError, TypeError) as error:  # the program's own errors, reported as for a request
            return f"{type(error).__name__}: {error}"
        if isinstance(outcome, RequestError):
            return str(outcome)
        return {one.name: _array(rows) for one, rows in zip(spec.outputs, outcome, strict=True)}

    return run


def _ask(inputs: dict[str, Any], spec: EngineSpec) -> Ask:
    if spec.pictures is not None:
        return Ask(pictures=tuple(inputs[spec.inputs[0].name].ravel().tolist()))
    return Ask(tuple(torch.from_numpy(inputs[one.name]).to(WIRE_TYPES[one.data_type]) for one in spec.inputs))


def _array(rows: Any) -> Any:
    """Copies, because the next run overwrites the rows. numpy has no BF16."""
    return (rows.float() if rows.dtype is torch.bfloat16 else rows.clone()).numpy()
