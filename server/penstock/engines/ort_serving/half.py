"""Converts an ONNX file to FP16 in memory, by ONNX Runtime's own converter. Inputs and outputs keep their types.

The operators after the last convolution or matrix product stay in FP32, because they decode boxes. This costs little.
FP16 has 11 bits of precision: neighbouring numbers near column 600 of a picture are half a pixel apart.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import OrtLoadError

_MAX_BYTES = (1 << 31) - 1  # of a protobuf message
_PRODUCTS = frozenset(
    ("Attention", "Conv", "ConvTranspose", "DeformConv", "Einsum", "FusedConv", "FusedMatMul", "Gemm", "GRU", "LSTM",
     "MatMul", "MultiHeadAttention", "RNN")
)  # fmt: skip


def converted_to_fp16(path: Path) -> bytes:
    """The model with FP16 weights and operators. Raises OrtLoadError."""
    try:
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16
    except ImportError as error:
        raise OrtLoadError(f"the conversion needs the package onnx ({error})") from error
    try:
        model = onnx.load(str(path))
        tail = _cut_tail(model.graph, onnx.shape_inference.infer_shapes(model).graph.value_info)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each constant that FP16 cannot represent; outputs are compared
            model = convert_float_to_float16(model, keep_io_types=True)
        if tail is not None:
            tail.append_to(model.graph)
        size = int(model.ByteSize())
        if size > _MAX_BYTES:
            raise OrtLoadError(f"the converted model has {size} bytes (limit {_MAX_BYTES})")
        return bytes(model.SerializeToString())
    except OrtLoadError:
        raise
    except Exception as error:  # the converter raises whatever its checks and protobuf raise
        raise OrtLoadError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class _Tail:
    """Nodes after the last product, in FP32, with their constants. outputs: those of the whole graph."""

    nodes: list[Any]
    constants: list[Any]
    outputs: list[Any]

    def append_to(self, graph: Any) -> None:
        """graph: the converted rest. Its outputs are this tail's inputs, in their own types."""
        made = {name for node in self.nodes for name in node.output}
        kept = [one for one in graph.value_info if one.name not in made]  # the converter declares all as FP16
        del graph.value_info[:], graph.output[:]
        graph.value_info.extend(kept)
        graph.node.extend(self.nodes)
        graph.initializer.extend(self.constants)
        graph.output.extend(self.outputs)


def _cut_tail(graph: Any, inferred: Any) -> _Tail | None:
    """Removes the tail from the graph, whose outputs are then the tail's inputs. Returns None and changes nothing if
    there is no tail, or if a type of its inputs is unknown. inferred: value_info of all tensors."""
    nodes = _nodes_after_products(graph)
    made = {name for node in nodes for name in node.output}
    outputs, fed = list(graph.output), {one.name for one in graph.input}
    constants = {one.name: one for one in graph.initializer if one.name not in fed}
    read = dict.fromkeys(name for node in nodes for name in node.input if name)
    types = {one.name: one for one in (*inferred, *outputs) if one.type.tensor_type.elem_type}
    needed = [name for name in read if name not in made and name not in constants and name not in fed]
    if not nodes or any(name not in types for name in needed):
        return None
    kept = [node for node in graph.node if made.isdisjoint(node.output)]
    if not kept:
        return None
    used = {name for node in kept for name in (*node.input, *_read_inside(node))}
    own = [_renamed(constants[name], nodes, is_shared=name in used) for name in read if name in constants]
    rest = [one for one in graph.initializer if one.name in used or one.name not in read]
    ends = [*(one for one in outputs if one.name not in made), *(types[name] for name in needed)]
    del graph.node[:], graph.initializer[:], graph.output[:]
    graph.node.extend(kept)
    graph.initializer.extend(rest)
    graph.output.extend({one.name: one for one in ends}.values())
    return _Tail(nodes, own, outputs)


def _nodes_after_products(graph: Any) -> list[Any]:
    """Copies of the nodes from which no product is reachable, in the graph's order, because ONNX requires topological
    order."""
    before: set[str] = set()  # tensors from which a product is reachable
    found = []
    for node in reversed(graph.node):
        inner = set(_read_inside(node))
        if node.op_type in _PRODUCTS or inner or not before.isdisjoint(node.output):
            before |= {*node.input, *inner}
        else:
            found.append(type(node).FromString(node.SerializeToString()))
    return found[::-1]


def _read_inside(node: Any) -> Iterator[str]:
    """Tensors that the nodes of its subgraphs read."""
    for attribute in node.attribute:
        for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
            for inner in graph.node:
                yield from inner.input
                yield from _read_inside(inner)


def _renamed(constant: Any, nodes: list[Any], *, is_shared: bool) -> Any:
    """The constant, or a copy under a name of its own for these nodes if the rest of the graph reads it too."""
    if not is_shared:
        return constant
    copy = type(constant).FromString(constant.SerializeToString())
    copy.name = f"{constant.name}_fp32"
    for node in nodes:
        node.input[:] = [copy.name if name == constant.name else name for name in node.input]
    return copy
