"""A GPU in host memory, and sessions on it that compute on the CPU, for tests of ort_serving without a GPU.

A session captures as ONNX Runtime does: the first run of a graph id fixes addresses and shapes for all later ones.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from penstock.engines.ort_serving import opening
from penstock.engines.ort_serving.config import Signature, complete, validate
from penstock.engines.ort_serving.cudart import CudaError
from penstock.engines.ort_serving.opening import Opened, Placement, open_model
from penstock.engines.ort_serving.session import OrtModel

CUDA_PROVIDER = "CUDAExecutionProvider"


class FakeCuda:
    """Implements Cuda. memory_bytes: of the GPU."""

    def __init__(self, device_id: int = 0, *, memory_bytes: int = 1 << 30) -> None:
        self.device_id = device_id
        self.stream = 77
        self.is_closed = self.lost = self.has_no_host_memory = False
        self.waited: list[int] = []
        self.copies: list[int] = []  # their sizes in bytes
        self.sources: list[int] = []  # their addresses
        self.page_locked: set[int] = set()
        self._memory_bytes = memory_bytes
        self._blocks: dict[int, Any] = {}

    def allocate(self, size: int) -> int:
        """See Cuda."""
        if size > self.free_bytes():
            raise CudaError("cudaMalloc: out of memory (CUDA error 2)")
        block = np.zeros(max(size, 1), np.uint8)
        self._blocks[block.ctypes.data] = block
        return int(block.ctypes.data)

    def allocate_host(self, size: int) -> Any:
        """See Cuda."""
        if self.has_no_host_memory:
            raise CudaError("cudaHostAlloc: out of memory (CUDA error 2)")
        return np.zeros(max(size, 1), np.uint8)

    def is_page_locked(self, address: int) -> bool:
        """See Cuda."""
        return address in self.page_locked

    def free_memory(self) -> None:
        """See Cuda."""
        self._blocks.clear()

    def close(self) -> None:
        """See Cuda."""
        self.free_memory()
        self.is_closed = True

    def copy(self, target: int, source: int, size: int) -> None:
        """See Cuda."""
        self.copies.append(size)
        self.sources.append(source)
        ctypes.memmove(target, source, size)

    def synchronize(self) -> None:
        """See Cuda."""

    def wait_for(self, stream: int) -> None:
        """See Cuda."""
        self.waited.append(stream)

    def free_bytes(self) -> int:
        """See Cuda."""
        return self._memory_bytes - sum(len(block) for block in self._blocks.values())

    def is_lost(self) -> bool:
        """See Cuda."""
        return self.lost


class DeviceArray:
    """A contiguous array on the fake GPU, as PyTorch's and CuPy's are."""

    def __init__(self, array: Any, *, stream: int | None = None, strides: tuple[int, ...] | None = None) -> None:
        self._array = np.ascontiguousarray(array)
        self.__cuda_array_interface__ = {
            "shape": self._array.shape,
            "typestr": self._array.dtype.str,
            "data": (self._array.ctypes.data, False),
            "strides": strides,
            "stream": stream,
            "version": 3,
        }


class FakeBinding:
    """Records addresses: name → (dtype, shape, address)."""

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[Any, tuple[int, ...], int]] = {}
        self.outputs: dict[str, tuple[Any, tuple[int, ...], int]] = {}

    def bind_input(self, name: str, device: str, device_id: int, dtype: Any, shape: Any, address: int) -> None:
        """As ort.IOBinding's."""
        assert (device, device_id) == ("cuda", 0)
        self.inputs[name] = (dtype, tuple(shape), address)

    def bind_output(self, name: str, device: str, device_id: int, dtype: Any, shape: Any, address: int) -> None:
        """As ort.IOBinding's."""
        assert (device, device_id) == ("cuda", 0)
        self.outputs[name] = (dtype, tuple(shape), address)


class FakeSession:
    """A session of the model on the fake GPU. change: applied to each float output. fail: called before each run."""

    def __init__(
        self,
        session: ort.InferenceSession,
        options: dict[str, str],
        *,
        change: Callable[[Any], Any] = lambda array: array,
        fail: Callable[[int], None] = lambda _: None,  # argument: rows
    ) -> None:
        self._session = session
        self._change, self._fail = change, fail
        self.options = options
        self.has_graphs = options["enable_cuda_graph"] == "1"
        self.graphs: dict[str, FakeBinding] = {}
        self.runs: list[tuple[str, int]] = []  # (graph id, rows) of each bound run

    def get_providers(self) -> list[str]:
        """As ort.InferenceSession's."""
        return [CUDA_PROVIDER, "CPUExecutionProvider"]

    def io_binding(self) -> FakeBinding:
        """As ort.InferenceSession's."""
        return FakeBinding()

    def run(self, names: list[str], feed: dict[str, Any], options: Any = None) -> list[Any]:
        """As ort.InferenceSession's; a graph would be captured at addresses that do not last."""
        assert options is not None
        assert options.get_run_config_entry("gpu_graph_id") == "-1"
        self._fail(len(next(iter(feed.values()))))
        return [self._changed(array) for array in self._session.run(names, feed)]

    def run_with_iobinding(self, binding: FakeBinding, options: Any) -> None:
        """As ort.InferenceSession's."""
        graph_id = options.get_run_config_entry("gpu_graph_id")
        if graph_id != "-1":
            assert self.has_graphs
            binding = self.graphs.setdefault(graph_id, binding)
        arrays = {name: _at(*place) for name, place in binding.inputs.items()}
        self.runs.append((graph_id, len(next(iter(arrays.values())))))
        self._fail(self.runs[-1][1])
        outputs = self._session.run(list(binding.outputs), arrays)
        for place, array in zip(binding.outputs.values(), outputs, strict=True):
            np.copyto(_at(*place), self._changed(array))

    def _changed(self, array: Any) -> Any:
        return self._change(array) if array.dtype.kind == "f" else array


def _at(dtype: Any, shape: tuple[int, ...], address: int) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = (ctypes.c_uint8 * size).from_address(address)
    return np.ctypeslib.as_array(buffer).view(dtype).reshape(shape)


def _accept(session: ort.InferenceSession, options: dict[str, str]) -> None:
    del session, options


def fake_open_session(
    made: list[FakeSession],
    *,
    refuse: Callable[[ort.InferenceSession, dict[str, str]], None] = _accept,
    **behaviour: Any,
) -> Callable[[Path | bytes, ort.SessionOptions, list[Any]], Any]:
    """A replacement of session.open_session. made: gets each session on the GPU. behaviour: of FakeSession.

    refuse: raises for a session that cannot be opened with these options of the provider.
    """

    def open_session(source: Path | bytes, options: ort.SessionOptions, providers: list[Any]) -> Any:
        content = str(source) if isinstance(source, Path) else source
        session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        if isinstance(providers[0], str):
            return session
        name, cuda = providers[0]
        assert name == CUDA_PROVIDER
        refuse(session, cuda)
        made.append(FakeSession(session, cuda, **behaviour))
        return made[-1]

    return open_session


Patch = pytest.MonkeyPatch


class Bench:
    """Opens models on the fake GPU. sessions: those on the GPU, in the order of opening."""

    def __init__(self, folder: Path, patch: Patch) -> None:
        self.cuda = FakeCuda()
        self.sessions: list[FakeSession] = []
        self._folder = folder
        self._patch = patch
        patch.setattr(ort, "get_available_providers", lambda: [CUDA_PROVIDER, "CPUExecutionProvider"])

    def open(
        self,
        model: onnx.ModelProto,
        parameters: dict[str, str] | None = None,
        *,
        max_batch_size: int = 8,
        kind: str = "GPU",
        open_cuda: Callable[[int], FakeCuda] | None = None,
        **behaviour: Any,
    ) -> Opened:
        """The opened model. behaviour: of FakeSession."""
        path = self._folder / "m" / "1" / "model.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)
        values = {key: {"string_value": value} for key, value in (parameters or {}).items()}
        config: dict[str, Any] = {"name": "m", "max_batch_size": max_batch_size, "parameters": values}

        def completed(signature: Signature) -> dict[str, Any]:
            complete(config, signature)
            validate(config, signature)
            return config

        self._patch.setattr(opening, "open_session", fake_open_session(self.sessions, **behaviour))
        return open_model(
            path, Placement(kind), ort.SessionOptions, completed, open_cuda=open_cuda or (lambda _: self.cuda)
        )


def rows(*values: float) -> Any:
    return np.array([[value] * 3 for value in values], np.float32)


def y_of(opened: Opened, x: Any) -> Any:
    """The output of x [N, 3] → y."""
    return OrtModel(opened.session, opened.signature, opened.config).run(["y"], {"x": x})[0]
