"""Small ONNX files whose declarations are those of real exporters' files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str]


def constant_model(
    path: Path,
    outputs: Mapping[str, np.ndarray],
    *,
    image: Shape = (1, 3, 416, 416),
    input_name: str = "images",
    shapes: Mapping[str, Shape] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A model whose outputs are constants. shapes: what is declared where it is not the arrays' own."""
    nodes, declared, initializers = [], [], []
    for name, array in outputs.items():
        initializers.append(numpy_helper.from_array(array, f"{name}.value"))
        nodes.append(helper.make_node("Identity", [f"{name}.value"], [name]))
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        declared.append(helper.make_tensor_value_info(name, kind, list((shapes or {}).get(name, array.shape))))
    inputs = [helper.make_tensor_value_info(input_name, TensorProto.FLOAT, list(image))]
    graph = helper.make_graph(nodes, "made", inputs, declared, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, dict(metadata or {}))
    onnx.save(model, path)
    return path
