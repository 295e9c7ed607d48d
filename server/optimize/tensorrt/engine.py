"""A plan that runs here: what it answers, how long it takes, and what it says of its layers.

docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api: Runtime, ICudaEngine, IExecutionContext and
EngineInspector; tensors by name, as from 8.5 on.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from server.core.model import TensorSpec
from server.core.tensor import Array
from server.optimize.errors import OptimizeError
from server.optimize.tensorrt.binding import TensorRt
from server.optimize.tensorrt.cuda import Cuda

_DTYPES: dict[str, type[np.generic]] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}


class Engine:
    """One execution context. It runs by name as ONNX Runtime's sessions do, so that who judges those judges it."""

    def __init__(self, tensorrt: TensorRt, plan: bytes, cuda: Cuda) -> None:
        self._tensorrt, self._cuda = tensorrt, cuda
        self._runtime = tensorrt.module.Runtime(tensorrt.logger)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise OptimizeError(f"TensorRT {tensorrt.release} does not read the plan: {tensorrt.last_error()}")
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise OptimizeError(f"the engine has no memory to run in: {tensorrt.last_error()}")
        self._buffers: dict[str, tuple[int, int]] = {}  # tensor → address, bytes
        names = [self._engine.get_tensor_name(number) for number in range(self._engine.num_io_tensors)]
        self._inputs = [name for name in names if self._is_input(name)]
        self._outputs = [name for name in names if not self._is_input(name)]

    def check_types(self, declared: Sequence[TensorSpec]) -> None:
        """Raises OptimizeError where Triton would refuse the plan beside a config.pbtxt that declares these tensors."""
        here = {*self._inputs, *self._outputs}
        for spec in declared:
            if spec.name in here and (found := np.dtype(self._dtype(spec.name))) != spec.datatype.dtype:
                raise OptimizeError(
                    f"TensorRT {self._tensorrt.release} makes {found} of {spec.name}, which is {spec.datatype} in "
                    "config.pbtxt, and Triton loads no such plan: export the model with that type, or take a TensorRT "
                    "that knows it (INT64: 10.0 on)"
                )

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Array]) -> list[Array]:
        """The outputs `names`, or all; each an array of its own. Raises OptimizeError."""
        self.load(feed)
        self.enqueue()
        self._cuda.wait()
        return [self._output(name) for name in (self._outputs if names is None else names)]

    def load(self, feed: Mapping[str, Array]) -> None:
        """Copies the inputs and makes room for the outputs of such a batch; enqueue() runs it as often as wanted."""
        for name in self._inputs:
            array = np.ascontiguousarray(feed[name], dtype=self._dtype(name))
            if not self._context.set_input_shape(name, array.shape):
                raise OptimizeError(
                    f"the engine does not take {name} of shape {list(array.shape)}: {self._tensorrt.last_error()}"
                )
            self._cuda.copy_in(self._room(name, array.nbytes), array)
        for name in self._outputs:
            self._room(name, self._empty(name).nbytes)

    def enqueue(self) -> None:
        """One run of what was loaded, on the stream; the caller waits."""
        if not self._context.execute_async_v3(self._cuda.stream):
            raise OptimizeError(f"the engine does not run: {self._tensorrt.last_error()}")

    def layers(self) -> str:
        """EngineInspector's JSON of the whole engine."""
        inspector = self._engine.create_engine_inspector()
        return str(inspector.get_engine_information(self._tensorrt.module.LayerInformationFormat.JSON))

    def close(self) -> None:
        """Gives the buffers back."""
        for address, _ in self._buffers.values():
            self._cuda.free(address)
        self._buffers.clear()

    def _is_input(self, name: str) -> bool:
        return bool(self._engine.get_tensor_mode(name) == self._tensorrt.module.TensorIOMode.INPUT)

    def _dtype(self, name: str) -> type[np.generic]:
        told = str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]
        if told not in _DTYPES:
            raise OptimizeError(f"the engine's tensor {name} is of type {told}, which Triton cannot take")
        return _DTYPES[told]

    def _room(self, name: str, size_bytes: int) -> int:
        address, had = self._buffers.get(name, (0, -1))
        if had < size_bytes:
            if had >= 0:
                self._cuda.free(address)
            address = self._cuda.allocate(size_bytes)
            self._buffers[name] = (address, size_bytes)
        if not self._context.set_tensor_address(name, address):
            raise OptimizeError(f"the engine does not take memory for {name}: {self._tensorrt.last_error()}")
        return address

    def _empty(self, name: str) -> Array:
        shape = tuple(self._context.get_tensor_shape(name))
        if any(dim < 0 for dim in shape):
            raise OptimizeError(
                f"the shape of output {name} depends on what is in the picture ({list(shape)}): leave what drops boxes "
                "out of the network, the gateway's parser does it"
            )
        return np.empty(shape, self._dtype(name))

    def _output(self, name: str) -> Array:
        if name not in self._outputs:
            raise OptimizeError(f"the engine has no output {name}: it has {', '.join(self._outputs)}")
        array = self._empty(name)
        self._cuda.copy_out(self._buffers[name][0], array)
        return array
