"""A float32 graph to one of half precision, for a TensorRT that computes what the file says.

TensorRT 11 is strongly typed: it has no flag for FP16 any more (NVIDIA's migration guide from 10.x to 11.x), so the
file must say it. Inputs and outputs stay float32, so that the model's config stays what it is.
"""

import contextlib
import warnings
from collections.abc import Iterator

import onnx
from onnx import version_converter
from onnxruntime.transformers.float16 import convert_float_to_float16

from server.backends.ort_serving.session import ORT_ERRORS, ort_sentence
from server.optimize.errors import OptimizeError

HALF_SCALES_OPSET = 19  # QuantizeLinear takes a scale of FP16 from here on


def in_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same network in FP16, quantised pairs with FP16 scales. Raises OptimizeError where it has no such form."""
    try:
        with _quiet():
            raised = _with_half_scales(model)
            result: onnx.ModelProto = convert_float_to_float16(raised, keep_io_types=True)
    except (*ORT_ERRORS, KeyError) as error:
        raise OptimizeError(f"the network has no FP16 form: {ort_sentence(error)}") from error
    return result


def sorted_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose nodes follow their inputs, as ONNX demands and neither the quantiser nor the converter cares for."""
    known = {item.name for item in model.graph.input} | {item.name for item in model.graph.initializer}
    waiting, ordered = list(model.graph.node), []
    while waiting:
        ready = [node for node in waiting if all(not name or name in known for name in node.input)]
        if not ready:
            raise OptimizeError(f"node {waiting[0].name!r} reads what no other makes")
        ordered += ready
        known.update(name for node in ready for name in node.output)
        taken = {id(node) for node in ready}
        waiting = [node for node in waiting if id(node) not in taken]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(ordered)
    return result


def _with_half_scales(model: onnx.ModelProto) -> onnx.ModelProto:
    """As it is where nothing is quantised: conversions are not made for nothing."""
    version = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    is_quantised = any(node.op_type == "QuantizeLinear" for node in model.graph.node)
    if not is_quantised or version >= HALF_SCALES_OPSET:
        return model
    return version_converter.convert_version(model, HALF_SCALES_OPSET)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The converter warns of each number that FP16 rounds; what that costs is measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
