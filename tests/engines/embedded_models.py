"""Models for the tests of the embedded engine."""

import shutil
from pathlib import Path

import numpy as np

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.protocol.inference import InferRequest, tensor_from_numpy
from tests.contract.models import x_and_y
from tests.engines import onnx_models

ROW = np.array([[1, 2, 3]], np.float32)


def plus(repository: Path, addend: float, *, name: str = "plus", version: int = 1, rest: str = "") -> None:
    """x → y = x + addend; written over what was there."""
    shutil.rmtree(repository / name / str(version), ignore_errors=True)
    onnx_models.save(onnx_models.plus(addend), repository, name, version=version, config=x_and_y(rest=rest))


async def y_of(engine: EmbeddedEngine, name: str = "plus") -> list[float]:
    """The model's answer to [1, 2, 3]."""
    response = await engine.infer(InferRequest(name, (tensor_from_numpy("x", ROW),)))
    answer: list[float] = response.outputs[0].to_numpy()[0].tolist()
    return answer
