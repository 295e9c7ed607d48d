"""Reference outputs of an ONNX file: ONNX Runtime on the CPU, without graph optimisation, one thread."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from penstock.engines.ort_serving.config import Config, OrtLoadError
from penstock.engines.ort_serving.session import ORT_ERRORS, open_for_reading, open_session, ort_error_text
from penstock.engines.ort_serving.session import session_options as options_of
from penstock.engines.ort_serving.threads import ThreadBudget
from penstock.protocol.errors import EngineFailed, InvalidRequest, ModelNotReady
from penstock.protocol.inference import Array, Datatype, Tensor, tensor_from_bytes, tensor_from_numpy

_EIGHT_BITS = ("QuantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger")
RECORDED_WITH = f"ONNX Runtime {ort.__version__}, CPU, graph optimisations off"


@dataclass(frozen=True, slots=True)
class Reference:
    """Outputs of the graph as in the file, and as optimised by ONNX Runtime."""

    plain: tuple[Tensor, ...]
    optimised: tuple[Tensor, ...]
    is_quantised: bool  # computes in 8 bits: the two outputs may differ by whole steps


def run_reference(path: Path, config: Config, inputs: tuple[Tensor, ...]) -> Reference:
    """Runs the model on the inputs. config: Triton's, as parsed JSON. Raises ModelNotReady, InvalidRequest. Blocks."""
    try:
        plain = open_for_reading(path, config)
        options = options_of(config, ThreadBudget(cores=1, instances=1))
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        optimised = open_session(path, options, ["CPUExecutionProvider"])
    except OrtLoadError as error:
        raise ModelNotReady(str(error)) from error
    return Reference(_run(plain, inputs), _run(optimised, inputs), is_quantised(path))


def is_quantised(path: Path) -> bool:
    """Whether any operator of the ONNX file computes in 8 bits."""
    graph = onnx.load(path, load_external_data=False).graph
    return any(node.op_type in _EIGHT_BITS or node.op_type.startswith("QLinear") for node in graph.node)


def _run(session: ort.InferenceSession, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    names = [output.name for output in session.get_outputs()]
    ranks = {node.name: len(node.shape) for node in session.get_inputs()}
    feed = {tensor.name: _array(tensor, ranks.get(tensor.name)) for tensor in inputs}
    try:
        arrays = session.run(names, feed)
    except ORT_ERRORS as error:
        raise InvalidRequest(f"plain ONNX Runtime does not take the input: {ort_error_text(error)}") from error
    return tuple(_tensor(name, array) for name, array in zip(names, arrays, strict=True))


def _array(tensor: Tensor, rank: int | None) -> Array:
    """As ONNX Runtime's Python API takes it: BYTES as str, scalars without a dimension."""
    array = tensor.to_numpy()
    if tensor.datatype is Datatype.BYTES:
        texts = np.empty(array.size, np.object_)
        texts[:] = [item.decode() for item in array.ravel()]
        array = texts.reshape(tensor.shape)
    return array.reshape(()) if rank == 0 and array.size == 1 else array


def _tensor(name: str, array: Any) -> Tensor:
    if not isinstance(array, np.ndarray):
        raise EngineFailed(f"output {name!r} is no tensor, and cannot be compared")
    if array.dtype == np.object_:
        return tensor_from_bytes(name, [str(item).encode() for item in array.ravel()], array.shape)
    return tensor_from_numpy(name, array)
