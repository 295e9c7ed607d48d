"""Which TensorRT-RTX engine a GPU takes, and why none: with a plug-in and a driver that only answer."""

import hashlib
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from penstock.engines.ort_serving.config import Config, OrtLoadError, Signature
from penstock.engines.ort_serving.opening import Opened, Placement, open_model
from penstock.engines.ort_serving.placement import TENSORRT_RTX, Precision
from penstock.engines.ort_serving.rtx_session import Card, InstalledRtx, open_engine
from penstock.engines.ort_serving.tensorrt_rtx import FOLDER, engine_key, engine_prefix
from tests.engines import onnx_models

ADA, HOPPER = Card((8, 9), "0000:3b:00.0"), Card((9, 0), "0000:3b:00.0")


@dataclass
class FakeRtx:
    """Opens every engine, or refuses all with a reason. session: in place of an engine's."""

    plugin: str = "1.7.1"
    gpu: Card = ADA
    refusal: str = ""
    session: Any = None
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def release(self) -> str:
        """As given."""
        return self.plugin

    def card(self, _device_id: int) -> Card:
        """As given."""
        return self.gpu

    def open(self, file: Path, _options: Any, card: Card, provider_options: dict[str, str]) -> Any:
        """Notes what was wanted."""
        if self.refusal:
            raise OrtLoadError(self.refusal)
        self.asked.append((file.name, card.pci_bus_id, provider_options))
        return self.session


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that adds 1 to rows of 3 numbers, with an engine for 8.9 in FP32."""
    path = tmp_path / "m" / "1" / "model.onnx"
    (path.parent / FOLDER).mkdir(parents=True)
    onnx.save(onnx_models.plus(1), path)
    (path.parent / FOLDER / engine_name(path)).touch()
    return path


def engine_name(model: Path) -> str:
    """Of its engine for 8.9 in FP32 by TensorRT-RTX 1.7.1."""
    sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
    return f"{engine_prefix('model', (8, 9), Precision.FP32)}{engine_key(sha256, '1.7.1.116')}.onnx"


def opened(model: Path, rtx: FakeRtx, precision: Precision = Precision.FP32) -> Any:
    """On GPU 0."""
    return open_engine(model, 0, precision, ort.SessionOptions, rtx)


def test_engine_of_the_gpus_architecture_is_opened_there(model: Path) -> None:
    """The key is that of the file and of the plug-in's release; kernels are cached beside the engine."""
    rtx = FakeRtx(session="a session")
    assert opened(model, rtx) == "a session"
    cache = str(model.parent / FOLDER / "runtime-cache")
    assert rtx.asked == [(engine_name(model), "0000:3b:00.0", {"nv_runtime_cache_path": cache})]


def test_model_without_engines_needs_no_plugin(tmp_path: Path) -> None:
    """Nothing was promised, so nothing is missing."""
    (tmp_path / "model.onnx").touch()
    assert opened(tmp_path / "model.onnx", FakeRtx(plugin="")) is None


@pytest.mark.parametrize(
    ("rtx", "precision", "why"),
    [
        (
            FakeRtx(plugin=""),
            Precision.FP32,
            "onnxruntime-ep-nv-tensorrt-rtx-cu13 is not installed in this environment (make tensorrt",
        ),
        (FakeRtx(gpu=HOPPER), Precision.FP32, "there is none for compute capability 9.0 in FP32, only sm89-fp32"),
        (FakeRtx(), Precision.FP16, "there is none for compute capability 8.9 in FP16"),
        (
            FakeRtx(plugin="1.8.0"),
            Precision.FP32,
            "that for 8.9 in FP32 is of another file, or not of TensorRT-RTX 1.8.0",
        ),
        (FakeRtx(refusal="no memory"), Precision.FP32, "no memory"),
    ],
)
def test_engine_that_does_not_fit_is_refused_with_its_reason(
    model: Path, rtx: FakeRtx, precision: Precision, why: str
) -> None:
    """The sentence names the architecture, the precision or the release."""
    with pytest.raises(OrtLoadError) as refused:
        opened(model, rtx, precision)
    assert why in str(refused.value)


def test_engine_of_a_changed_file_is_refused(model: Path) -> None:
    """An engine computes with the weights of the file that it was built from."""
    onnx.save(onnx_models.plus(2), model)
    with pytest.raises(OrtLoadError, match=r"that for 8\.9 in FP32 is of another file"):
        opened(model, FakeRtx())


class FakeSession:
    """Adds a number, in place of an engine; fails above 4 rows if the engine is too small."""

    def __init__(self, number: float, most_rows: int = 1000) -> None:
        self._number, self._most_rows = number, most_rows

    def run(self, _names: list[str], inputs: Mapping[str, Any], _options: Any = None) -> list[Any]:
        """One output."""
        (array,) = inputs.values()
        if len(array) > self._most_rows:
            raise RuntimeError(f"{len(array)} rows are not in the profile")
        return [np.asarray(array + self._number, array.dtype)]


def served(model: Path, rtx: FakeRtx, kind: str = "GPU") -> Opened:
    """The model as an engine opens it, with batches of up to 8."""
    rows = {"data_type": "TYPE_FP32", "dims": [3]}
    config: Config = {"max_batch_size": 8, "input": [{"name": "x", **rows}], "output": [{"name": "y", **rows}]}

    def complete(_signature: Signature) -> Config:
        return config

    return open_model(model, Placement(kind), ort.SessionOptions, complete, rtx=rtx)


def test_model_is_served_by_its_engine(model: Path) -> None:
    """The provider and the GPU are in the facts; outputs were compared with the CPU's."""
    rtx = FakeRtx(session=FakeSession(1))
    found = served(model, rtx)
    assert found.session is rtx.session
    assert (found.facts.device, found.facts.precision, found.facts.fallbacks) == ("tensorrt_rtx:0", "fp32", ())


@pytest.mark.parametrize(
    ("rtx", "why"),
    [
        (FakeRtx(session=FakeSession(3)), "its TensorRT-RTX engine is not used: output 'y' with 3 rows differs by"),
        (FakeRtx(session=FakeSession(1, most_rows=4)), "its TensorRT-RTX engine is not used: 8 rows are not in the"),
        (FakeRtx(gpu=HOPPER), "its TensorRT-RTX engine is not used: there is none for compute capability 9.0"),
    ],
)
def test_model_whose_engine_does_not_serve_is_served_without_it(model: Path, rtx: FakeRtx, why: str) -> None:
    """Wrong outputs, too small batches or another GPU: CUDA or the CPU serves, and the reason is in the facts."""
    found = served(model, rtx)
    assert found.facts.provider != TENSORRT_RTX
    assert found.facts.fallbacks[0].startswith(why)
    assert found.session.run(["y"], {"x": np.zeros((1, 3), np.float32)})[0].tolist() == [[1, 1, 1]]


def test_model_on_the_cpu_does_not_look_for_an_engine(model: Path) -> None:
    """It was not placed on a GPU."""
    rtx = FakeRtx(session=FakeSession(1))
    assert (served(model, rtx, "CPU").facts.fallbacks, rtx.asked) == ((), [])


@pytest.mark.skipif(find_library("cuda") is not None, reason="there is an NVIDIA driver here")
def test_machine_without_a_driver_is_a_sentence() -> None:
    """The plug-in is not even loaded then, as it needs the driver's library."""
    with pytest.raises(OrtLoadError, match="there is no NVIDIA driver"):
        InstalledRtx().card(0)
    assert InstalledRtx().release() in ("", "1.7.1")
