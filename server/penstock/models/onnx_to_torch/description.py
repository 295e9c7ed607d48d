"""Describes an ONNX graph for program.py, which runs where neither Penstock nor onnx is installed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

_TYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.BOOL: "bool",
}
_ROWS = 2  # torch.export takes a batch of one for a constant


class CannotDescribe(Exception):
    """The graph has something that the description does not support; the text is the reason."""


def describe(path: Path, folder: Path) -> None:
    """Writes graph.json and constants.npz into the folder. Raises CannotDescribe, OSError."""
    model = onnx.load(path)
    graph = model.graph
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    nodes = []
    for node in graph.node:
        attributes = {one.name: _attribute(one) for one in node.attribute}
        if node.op_type == "Constant":
            constants[node.output[0]] = np.asarray(next(iter(attributes.values())))
            continue
        if node.op_type == "Cast":
            attributes["to"] = _type_name(attributes["to"])
        listed = {name: value for name, value in attributes.items() if not isinstance(value, np.ndarray)}
        if node.domain not in ("", "ai.onnx") or len(listed) != len(attributes):
            raise CannotDescribe(f"the operator {node.domain or 'ai.onnx'}:{node.op_type}")
        nodes.append(
            {"op": node.op_type, "inputs": list(node.input), "outputs": list(node.output), "attributes": listed}
        )
    inputs = [one for one in graph.input if one.name not in constants]
    is_free = all(one.type.tensor_type.shape.dim[0].dim_value == 0 for one in inputs)
    described = {
        "inputs": [one.name for one in inputs],
        "outputs": [one.name for one in graph.output],
        "nodes": nodes,
        "constants": list(constants),
        "samples": [_sample(one, is_free=is_free) for one in inputs],
        "has_free_rows": is_free,
    }
    (folder / "graph.json").write_text(json.dumps(described))
    arrays: dict[str, Any] = {str(place): value for place, value in enumerate(constants.values())}
    np.savez(folder / "constants.npz", **arrays)


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, onnx.GraphProto):
        raise CannotDescribe("an operator with a subgraph, such as If or Loop, is not supported")
    return list(value) if not isinstance(value, (int, float, str)) else value


def _type_name(number: int) -> str:
    if number not in _TYPES:
        raise CannotDescribe(f"the type {onnx.TensorProto.DataType.Name(onnx.TensorProto.DataType.ValueType(number))}")
    return _TYPES[number]


def _sample(value: onnx.ValueInfoProto, *, is_free: bool) -> tuple[str, list[int]]:
    tensor = value.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    if is_free:
        shape[0] = _ROWS
    if min(shape, default=1) < 1:
        raise CannotDescribe(f"input {value.name!r} has dynamic dimensions after the batch dimension")
    return _type_name(tensor.elem_type), shape
