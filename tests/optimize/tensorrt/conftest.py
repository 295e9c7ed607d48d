"""A machine with a card and TensorRT, neither of them real."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.gpu.nvml import NvmlOutcome, Reading
from server.optimize.tensorrt import optimise
from server.optimize.tensorrt.cuda import open_cuda
from tests.optimize.tensorrt.fake_cuda import FakeCuda
from tests.optimize.tensorrt.fake_tensorrt import fake_tensorrt

Install = Callable[..., Any]


def stand_in(monkeypatch: pytest.MonkeyPatch, module: Any, card: FakeCuda) -> Any:
    """Lets the module be what `import tensorrt` finds, and the card what CUDA sees."""
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setattr(optimise, "open_cuda", lambda: open_cuda(card))
    monkeypatch.setattr(optimise, "read_cards", lambda: Reading(NvmlOutcome.ANSWERED, driver="580.95.05"))
    return module


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """install(card=…, version=…, weak=…, faults…) → the module."""

    def installed(*, card: FakeCuda | None = None, **wanted: Any) -> Any:
        return stand_in(monkeypatch, fake_tensorrt(**wanted), card or FakeCuda())

    return installed


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    """Where plans are kept; not there yet."""
    return tmp_path / "plans"
