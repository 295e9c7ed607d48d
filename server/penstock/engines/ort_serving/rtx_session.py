"""Opens a model's TensorRT-RTX engine by ONNX Runtime's plug-in execution provider.

It was never run: no GPU that the plug-in supports was at hand.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnxruntime as ort

from .config import OrtLoadError
from .placement import Precision
from .session import ORT_ERRORS, ort_error_text
from .tensorrt_rtx import FOLDER, PROVIDER, RUNTIME_CACHE, engine_key, engine_prefix

PACKAGE = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
_MODULE = "onnxruntime_ep_nv_tensorrt_rtx"
_INSTALL = "make tensorrt in a checkout, else pip install 'penstock[tensorrt]' and penstock setup triton --tensorrt"
_LIBRARY = "libtensorrt_rtx.so."
_MAJOR, _MINOR = 75, 76  # attributes of cuDeviceGetAttribute: compute capability


@dataclass(frozen=True)
class Card:
    """A GPU by the driver. pci_bus_id: such as 0000:3b:00.0."""

    capability: tuple[int, int]
    pci_bus_id: str


class TensorRtRtx(Protocol):
    """The driver, and ONNX Runtime's plug-in for TensorRT-RTX."""

    def release(self) -> str:
        """Version of the plug-in's TensorRT-RTX, such as 1.7.1; empty if it is not installed."""

    def card(self, device_id: int) -> Card:
        """A GPU, as CUDA counts. Raises OrtLoadError."""

    def open(self, file: Path, options: ort.SessionOptions, card: Card, provider_options: dict[str, str]) -> Any:
        """A session with the engine. Raises OrtLoadError."""


def open_engine(
    path: Path, device_id: int, precision: Precision, options: Callable[[], ort.SessionOptions], rtx: TensorRtRtx
) -> Any | None:
    """A session with the engine of an ONNX file for this GPU; None if the file has no engines.

    device_id: as CUDA counts. options: new session options. Raises OrtLoadError if no engine fits or can be opened.
    """
    engines = _engines(path)
    if not engines:
        return None
    card = rtx.card(device_id)
    name = f"{card.capability[0]}.{card.capability[1]} in {precision.name}"
    prefix = engine_prefix(path.stem, card.capability, precision)
    if not any(engine.startswith(prefix) for engine in engines):
        kinds = sorted({engine.removeprefix(f"{path.stem}-").rpartition("-")[0] for engine in engines})
        raise OrtLoadError(f"there is none for compute capability {name}, only {', '.join(kinds)}")
    release = rtx.release()
    if not release:
        raise OrtLoadError(f"{PACKAGE} is not installed in this environment ({_INSTALL})")
    file = path.parent / FOLDER / f"{prefix}{engine_key(_sha256(path), release)}.onnx"
    if file.name not in engines:
        raise OrtLoadError(f"that for {name} is of another file, or not of TensorRT-RTX {release}: build it again")
    return rtx.open(file, options(), card, _provider_options(file.parent))


def _engines(path: Path) -> list[str]:
    try:
        names = os.listdir(path.parent / FOLDER)
    except OSError:
        return []
    return [name for name in names if name.startswith(f"{path.stem}-sm") and name.endswith(".onnx")]


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _provider_options(folder: Path) -> dict[str, str]:
    cache = folder / RUNTIME_CACHE
    return {"nv_runtime_cache_path": str(cache)} if os.access(folder, os.W_OK) else {}


class InstalledRtx:
    """The plug-in of this environment, and this machine's driver."""

    def release(self) -> str:
        """Version of its TensorRT-RTX, such as 1.7.1; empty if it is not installed."""
        found = importlib.util.find_spec(_MODULE)
        folders = list(found.submodule_search_locations or []) if found is not None else []
        names = [file.name for folder in folders for file in Path(folder).glob(f"{_LIBRARY}*.*.*")]
        return names[0].removeprefix(_LIBRARY) if names else ""

    def card(self, device_id: int) -> Card:
        """A GPU, as CUDA counts. Raises OrtLoadError without a driver or such a GPU."""
        return _driver_card(device_id)

    def open(self, file: Path, options: ort.SessionOptions, card: Card, provider_options: dict[str, str]) -> Any:
        """A session with the engine. Raises OrtLoadError."""
        _register()
        devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
        fitting = [one for one in devices if one.device.metadata.get("pci_bus_id", "").lower() == card.pci_bus_id]
        if not fitting:
            where = "it looks for GPUs in /sys/class/drm"
            raise OrtLoadError(f"ONNX Runtime has no GPU {card.pci_bus_id} for the plug-in ({where})")
        try:
            options.add_provider_for_devices(fitting[:1], provider_options)
            return ort.InferenceSession(str(file), sess_options=options)
        except ORT_ERRORS as error:
            raise OrtLoadError(ort_error_text(error)) from None


@functools.cache
def _register() -> None:
    """Loads the plug-in into this process, once. Raises OrtLoadError."""
    try:
        module = importlib.import_module(_MODULE)
        ort.register_execution_provider_library(PROVIDER, module.get_library_path())
    except (ImportError, OSError, *ORT_ERRORS) as error:
        raise OrtLoadError(ort_error_text(error)) from None


def _driver_card(device_id: int) -> Card:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise OrtLoadError(f"there is no NVIDIA driver ({error})") from None
    device, value = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(32)

    def call(function: str, *arguments: Any) -> None:
        if code := getattr(cuda, function)(*arguments):
            raise OrtLoadError(f"the driver refuses GPU {device_id}: {function} returned {code}")

    def attribute(number: int) -> int:
        call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), device_id)
    call("cuDeviceGetPCIBusId", name, len(name), device)
    return Card((attribute(_MAJOR), attribute(_MINOR)), name.value.decode().lower())
