"""ONNX files with the tensors that a config.pbtxt declares: small graphs of random weights in the real files' stead."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.engines.config_pbtxt import read_config
from penstock.protocol.engine import ModelConfig, TensorSpec

OPSET = 17
IR_VERSION = 8  # what every ONNX Runtime that is used here reads


def write_stand_in(folder: Path) -> Path:
    """1/model.onnx in the model folder: its input pooled to its output's cells, mixed by random weights of seed 0.

    For models of one image input and one float output, (classes, …) or (channels, rows, columns) an image.
    """
    config = read_config(folder / "config.pbtxt")
    path = folder / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save_model(_model(config), path)
    return path


def _model(config: ModelConfig) -> onnx.ModelProto:
    (image,), (answer,) = config.inputs, config.outputs
    is_batched = config.max_batch_size > 0
    channels, height, width = image.shape[-3:]
    shape = answer.shape if is_batched else answer.shape[1:]
    rows, columns = (shape[1], shape[2]) if len(shape) == 3 else (1, 1)
    weights = np.random.default_rng(0).normal(0.0, 0.05, (shape[0], channels, 1, 1)).astype(np.float32)
    cells = [height // rows, width // columns]
    nodes = [
        helper.make_node("AveragePool", [image.name], ["pooled"], kernel_shape=cells, strides=cells),
        helper.make_node("Conv", ["pooled", "weights"], ["mixed"]),
    ]
    is_logits = config.parameters.get("apply-softmax") == "1"
    nodes.append(helper.make_node("Identity" if is_logits else "Softmax", ["mixed"], ["scores"], **_axis(is_logits)))
    nodes.append(helper.make_node("Reshape", ["scores", "shape"], [answer.name]))
    target = np.array([-1 if is_batched else 1, *shape], np.int64)
    constants = [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(target, "shape")]
    inputs, outputs = [_value(image, is_batched)], [_value(answer, is_batched)]
    graph = helper.make_graph(nodes, config.name, inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    return model


def _axis(is_logits: bool) -> dict[str, int]:
    return {} if is_logits else {"axis": 1}


def _value(spec: TensorSpec, is_batched: bool) -> onnx.ValueInfoProto:
    shape = ["N", *spec.shape] if is_batched else list(spec.shape)
    return helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, shape)
