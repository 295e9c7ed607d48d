"""ONNX files to build engines of."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from penstock.gpu.triton_images import Capability
from penstock.models.tensorrt_rtx.build import BuildRequest

NOT_INSTALLED = "TensorRT-RTX (tensorrt-rtx-cu13-bindings) is not installed here"
needs_tensorrt = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason=NOT_INSTALLED)


def real_model(shared: Path, folder: Path, name: str) -> Path:
    """A copy of one of ../shared's models, as engines are written beside the file."""
    return Path(shutil.copyfile(shared / "models" / name, folder / name))


def request_for(model: Path, architecture: Capability = (8, 9), max_batch: int = 4) -> BuildRequest:
    """The engine of a model."""
    return BuildRequest(str(model), architecture, max_batch)
