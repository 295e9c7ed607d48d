"""A session on a GPU: inputs and outputs at fixed addresses, one CUDA graph per batch size, one copy of all outputs.

ONNX Runtime captures a graph for a thread and a `gpu_graph_id`, so all calls of a session are made in one thread.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np
import onnxruntime as ort

from .config import OrtDeviceLost, OrtRequestError
from .cudart import Cuda, CudaError
from .device_tensor import DeviceRows
from .host_memory import LentBlocks, copy_in_parallel
from .placement import bucket_for
from .session import CLIENT_ERRORS, CPU_ONLY, ORT_ERRORS, SEVERITY_FATAL, ort_error_text

_ALIGNMENT = 256  # bytes, as cudaMalloc aligns
_GRAPH_ID, _NO_GRAPH = "gpu_graph_id", "-1"
T = TypeVar("T")


class Session(Protocol):
    """What CudaRunner calls of ort.InferenceSession."""

    def run(self, names: list[str], feed: dict[str, Any], options: Any) -> list[Any]: ...
    def io_binding(self) -> Any: ...
    def run_with_iobinding(self, binding: Any, options: Any) -> None: ...


@dataclass(frozen=True)
class TensorForm:
    """An input or output. row: its shape for one row, or its whole shape without a batch dimension."""

    name: str
    dtype: "np.dtype[Any]"
    row: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.row, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Forms:
    """All tensors of a model with fixed dimensions. has_batch: the first dimension of each is the batch's."""

    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    has_batch: bool

    def shape(self, form: TensorForm, rows: int) -> tuple[int, ...]:
        return (rows, *form.row) if self.has_batch else form.row


def offsets(forms: Sequence[TensorForm], rows: int) -> tuple[list[int], int]:
    """(offset of each tensor, size of all) in bytes, one after the other."""
    places, end = [], 0
    for form in forms:
        places.append(end)
        end += -(-form.row_bytes * rows // _ALIGNMENT) * _ALIGNMENT
    return places, end


def bound_options(graph_id: int | None) -> Any:
    """Options of a run at fixed addresses, by that CUDA graph, which the first run captures; None: without a graph.

    The run does not wait for the GPU.
    """
    options = _with_graph_id(_NO_GRAPH if graph_id is None else str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def unbound_options(options: Any = None) -> Any:
    """These options, or new ones, for a run whose inputs and outputs have changing addresses: without a graph."""
    return _with_graph_id(_NO_GRAPH, options)


def _with_graph_id(graph_id: str, options: Any = None) -> Any:
    if options is None:
        options = ort.RunOptions()
        options.log_severity_level = SEVERITY_FATAL
    options.add_run_config_entry(_GRAPH_ID, graph_id)
    return options


class CudaRunner:
    """Runs sessions of one model on one GPU. Use it in one thread.

    session_of: by batch size; mostly the same for all. forms: None if dimensions vary; then each run copies its own
    inputs. buckets: batch sizes to pad to, ascending; all of them have a CUDA graph after `capture`.
    """

    def __init__(
        self, session_of: Callable[[int], Session], cuda: Cuda, forms: Forms | None, buckets: Sequence[int]
    ) -> None:
        """Allocates all buffers. Raises CudaError."""
        self._session_of = session_of
        self._cuda = cuda
        self._forms = forms
        self._most_rows = buckets[-1]
        self._buckets: tuple[int, ...] = ()
        self._bindings: dict[int, Any] = {}
        self._options: dict[int, Any] = {}  # of the batch sizes with a graph
        self._without_graph = bound_options(None)
        if forms is not None:
            self._starts, input_bytes = offsets(forms.inputs, self._most_rows)
            output_bytes = offsets(forms.outputs, self._most_rows)[1]
            self._device_input, self._device_output = cuda.allocate(input_bytes), cuda.allocate(output_bytes)
            self._host_input = cuda.allocate_host(input_bytes)
            self._lent = LentBlocks(output_bytes, cuda.allocate_host)
            self._host_output = cuda.allocate_host(output_bytes)  # if too many are lent

    def capture(self, buckets: Sequence[int]) -> None:
        """Captures a graph for each size, the largest first, because the smaller ones reuse its memory."""
        for number, size in enumerate(reversed(buckets), start=1):
            self._options[size] = bound_options(number)
            self._session_of(size).run_with_iobinding(self._binding(size), self._options[size])
            self._cuda.synchronize()
        self._buckets = tuple(buckets)

    def run(self, names: Sequence[str], feed: Mapping[str, Any], options: Any = None) -> list[Any]:
        """The outputs `names`, in that order. Inputs: ndarrays, or objects with __cuda_array_interface__.

        options: of a run without fixed buffers. Raises ONNX Runtime's errors, CudaError, OrtRequestError.
        """
        rows = self._rows(feed)
        if rows is None and self._forms is not None:  # never through a session with graphs: it could break them
            shapes = ", ".join(f"'{name}' {list(_shape(array))}" for name, array in feed.items())
            raise OrtRequestError(f"the inputs {shapes} do not fit the model's", is_client_error=True)
        if rows is None or self._forms is None:
            host = {name: self._on_host(array) for name, array in feed.items()}
            return self._session_of(self._most_rows).run(list(names), host, unbound_options(options))
        if rows > self._most_rows:
            return self._in_parts(names, feed, rows)
        size = bucket_for(rows, self._buckets) or rows
        self._stage(self._forms, feed, rows)
        self._session_of(size).run_with_iobinding(self._binding(size), self._options.get(size, self._without_graph))
        return self._fetch(self._forms, names, rows, size)

    def _in_parts(self, names: Sequence[str], feed: Mapping[str, Any], rows: int) -> list[Any]:
        """A batch that is larger than the buffers."""
        starts = range(0, rows, self._most_rows)
        host = {name: self._on_host(array) for name, array in feed.items()}
        parts = [
            self.run(names, {name: array[start : start + self._most_rows] for name, array in host.items()})
            for start in starts
        ]
        return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    def _rows(self, feed: Mapping[str, Any]) -> int | None:
        """The number of rows; None if the inputs do not fit into the buffers."""
        forms = self._forms
        if forms is None or feed.keys() != {form.name for form in forms.inputs}:
            return None
        rows = int(_shape(feed[forms.inputs[0].name])[0]) if forms.has_batch else 1
        if not rows:
            return None
        is_fit = all(
            _shape(feed[form.name]) == forms.shape(form, rows) and _dtype(feed[form.name]) == form.dtype
            for form in forms.inputs
        )
        return rows if is_fit else None

    def _stage(self, forms: Forms, feed: Mapping[str, Any], rows: int) -> None:
        """Host arrays go through page-locked memory; device arrays are copied on the GPU."""
        for form, start in zip(forms.inputs, self._starts, strict=True):
            for part in _parts(feed[form.name]):
                size = form.row_bytes * (_shape(part)[0] if forms.has_batch else rows)
                if (source := _device_address(form.name, part, self._cuda)) is None:
                    source = self._page_locked(part, start, size)
                self._cuda.copy(self._device_input + start, source, size)
                start += size

    def _page_locked(self, array: Any, start: int, size: int) -> int:
        """Address of the array's content: its own if that is page-locked, else of its copy in the staging memory."""
        if array.flags.c_contiguous and self._cuda.is_page_locked(array.ctypes.data):
            return int(array.ctypes.data)
        place = self._host_input[start : start + size]
        copy_in_parallel(place.view(array.dtype).reshape(array.shape), array)
        return int(place.ctypes.data)

    def _binding(self, size: int) -> Any:
        """The addresses for that batch size; the same object each time."""
        binding = self._bindings.get(size)
        if binding is None and self._forms is not None:
            binding = self._session_of(size).io_binding()
            device = ("cuda", self._cuda.device_id)
            for form, start in zip(self._forms.inputs, self._starts, strict=True):
                shape = self._forms.shape(form, size)
                binding.bind_input(form.name, *device, form.dtype, shape, self._device_input + start)
            for form, start in zip(self._forms.outputs, offsets(self._forms.outputs, size)[0], strict=True):
                shape = self._forms.shape(form, size)
                binding.bind_output(form.name, *device, form.dtype, shape, self._device_output + start)
            self._bindings[size] = binding
        return binding

    def _fetch(self, forms: Forms, names: Sequence[str], rows: int, size: int) -> list[Any]:
        """One copy of all outputs to page-locked memory, which the answers lend."""
        starts, end = offsets(forms.outputs, size)
        block = self._lent.take()
        host = self._host_output if block is None else block
        self._cuda.copy(host.ctypes.data, self._device_output, end)
        self._cuda.synchronize()
        found = {}
        for form, start in zip(forms.outputs, starts, strict=True):
            if form.name in names:
                place = host[start : start + form.row_bytes * rows]
                array = place.view(form.dtype).reshape(forms.shape(form, rows))
                found[form.name] = array.copy() if block is None else array
        return [found[name] for name in names]

    def _on_host(self, array: Any) -> Any:
        if isinstance(array, DeviceRows):
            return np.concatenate([self._on_host(part) for part in array.parts])
        if not hasattr(array, "__cuda_array_interface__"):
            return array
        host = np.empty(_shape(array), _dtype(array))
        self._cuda.copy(host.ctypes.data, int(_device_address("", array, self._cuda) or 0), host.nbytes)
        self._cuda.synchronize()
        return host


def _parts(array: Any) -> Sequence[Any]:
    return array.parts if isinstance(array, DeviceRows) else (array,)


def _shape(array: Any) -> tuple[int, ...]:
    interface = getattr(array, "__cuda_array_interface__", None)
    return tuple(array.shape) if interface is None else tuple(interface["shape"])


def _dtype(array: Any) -> "np.dtype[Any]":
    interface = getattr(array, "__cuda_array_interface__", None)
    dtype: np.dtype[Any] = np.dtype(array.dtype if interface is None else interface["typestr"])
    return dtype


def _device_address(name: str, array: Any, cuda: Cuda) -> int | None:
    """Address of a device array, whose producer's stream is waited for; None for a host array."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return None
    strides = interface.get("strides")
    if strides is not None and tuple(strides) != _strides(interface["shape"], np.dtype(interface["typestr"])):
        raise OrtRequestError(f"input '{name}' on the GPU is not contiguous in memory", is_client_error=True)
    if (stream := interface.get("stream")) is not None:
        cuda.wait_for(int(stream))
    return int(interface["data"][0])


def _strides(shape: Sequence[int], dtype: "np.dtype[Any]") -> tuple[int, ...]:
    return tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) * dtype.itemsize for axis in range(len(shape)))


class DeviceThread:
    """The one thread that uses a GPU's session. A hanging GPU does not block the end of the process."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None: end
        self._thread = threading.Thread(target=_run_all, args=(self._calls,), name=f"cuda-{name}", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> T:
        """Its result, or its error. Not after close."""
        done: Future[T] = Future()
        self._calls.put(partial(_answer, done, work))
        try:
            return done.result()
        finally:
            del done

    def close(self, work: Callable[[], object]) -> None:
        """Ends after the running calls and then `work`. Takes no lock: the garbage collector may call it anywhere."""
        self._calls.put(work)
        self._calls.put(None)

    def join(self) -> None:
        """Waits for the end, after close."""
        self._thread.join()


def _answer(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  the caller gets it
        done.set_exception(error)
    finally:
        del done, work  # otherwise the error's traceback would keep the session in a cycle


def _run_all(calls: "SimpleQueue[Callable[[], object] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it may hold a session


class _DeviceState:
    """What a CudaSession owns on the GPU. Use it in the session's thread."""

    def __init__(self, runner: CudaRunner, cuda: Cuda) -> None:
        self._runner: CudaRunner | None = runner
        self.cuda = cuda

    def run(self, names: Sequence[str], feed: Mapping[str, Any], options: Any) -> list[Any]:
        if self._runner is None:
            raise OrtRequestError("the model is unloaded", is_client_error=False)
        return self._runner.run(names, feed, options)

    def free(self) -> None:
        self._runner = None  # the session goes first: its graphs use the stream and the buffers
        self.cuda.close()


class CudaSession:
    """A session on a GPU with ort.InferenceSession's `run`, for any thread. Runs are one after the other.

    Its memory is freed by `close`, or when it is garbage-collected.
    """

    def __init__(self, runner: CudaRunner, cuda: Cuda, thread: DeviceThread) -> None:
        self._state = _DeviceState(runner, cuda)
        self._thread = thread
        self._free = weakref.finalize(self, thread.close, self._state.free)
        self._free.atexit = False  # the process's end frees everything

    def get_providers(self) -> list[str]:
        return ["CUDAExecutionProvider", *CPU_ONLY]

    def run(self, names: Sequence[str], feed: Mapping[str, Any], options: Any = None) -> list[Any]:
        """See CudaRunner.run. Raises OrtDeviceLost, and OrtRequestError instead of CudaError."""
        try:
            return self._thread.call(lambda: self._state.run(names, feed, options))
        except CLIENT_ERRORS:
            raise
        except (CudaError, *ORT_ERRORS) as error:
            if self._thread.call(self._state.cuda.is_lost):
                raise OrtDeviceLost(ort_error_text(error)) from None
            if isinstance(error, CudaError):
                raise OrtRequestError(str(error), is_client_error=False) from None
            raise

    def close(self) -> None:
        """Frees the GPU's memory after the running calls. Returns at once."""
        self._free()
