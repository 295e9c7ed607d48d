"""ONNX files with the tensors that a config.pbtxt declares: small graphs in the real files' stead."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.engines.config_pbtxt import read_config
from penstock.protocol.engine import ModelConfig, TensorSpec
from penstock.protocol.inference import Datatype

OPSET = 17
_TYPES = {Datatype.FP32: TensorProto.FLOAT, Datatype.INT64: TensorProto.INT64}
IR_VERSION = 8  # what every ONNX Runtime that is used here reads


def write_stand_in(folder: Path) -> Path:
    """1/model.onnx in the model folder.

    Classifiers and FastestDet: the input pooled to the output's cells, mixed by random weights of seed 0. Others:
    constant outputs, 0 for detectors and 1 for the rest.
    """
    config = read_config(folder / "config.pbtxt")
    path = folder / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    is_mixed = config.parameters["network-type"] == "1" or config.name == "fastestdet"
    onnx.save_model(_model(config) if is_mixed else _constant_model(config), path)
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
    return _finished(config, nodes, constants)


def _constant_model(config: ModelConfig) -> onnx.ModelProto:
    """A row of each output for each row of the first input. Free dimensions of outputs have the length 2."""
    is_batched = config.max_batch_size > 0
    value = 0.0 if config.parameters["network-type"] == "0" else 1.0
    constants = [
        numpy_helper.from_array(np.array([1, 2, 3], np.int64), "axes"),
        numpy_helper.from_array(np.zeros(1, np.float32), "zero"),
        numpy_helper.from_array(np.array(value, np.float32), "value"),
    ]
    nodes = [
        helper.make_node("ReduceSum", [config.inputs[0].name, "axes"], ["sums"], keepdims=0),
        helper.make_node("Mul", ["sums", "zero"], ["zeros"]),
        helper.make_node("Shape", ["zeros"], ["batch"]),
        helper.make_node("ReduceSum", ["zeros"], ["no float"], keepdims=1),
        helper.make_node("Cast", ["no float"], ["nothing"], to=TensorProto.INT64),  # 0, which no optimiser can know
    ]
    for spec in config.outputs:
        name, shape = spec.name, spec.shape if is_batched else spec.shape[1:]
        sides = np.array([2 if side == -1 else side for side in shape], np.int64)
        constants.append(numpy_helper.from_array(sides, f"{name} sides"))
        nodes.append(helper.make_node("Add", [f"{name} sides", "nothing"], [f"{name} free sides"]))
        nodes.append(helper.make_node("Concat", ["batch", f"{name} free sides"], [f"{name} shape"], axis=0))
        nodes.append(helper.make_node("Expand", ["value", f"{name} shape"], [f"{name} floats"]))
        nodes.append(helper.make_node("Cast", [f"{name} floats"], [name], to=_TYPES[spec.datatype]))
    return _finished(config, nodes, constants)


def _finished(config: ModelConfig, nodes: list[onnx.NodeProto], constants: list[onnx.TensorProto]) -> onnx.ModelProto:
    is_batched = config.max_batch_size > 0
    inputs = [_value(spec, is_batched) for spec in config.inputs]
    outputs = [_value(spec, is_batched) for spec in config.outputs]
    graph = helper.make_graph(nodes, config.name, inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    return model


def _axis(is_logits: bool) -> dict[str, int]:
    return {} if is_logits else {"axis": 1}


def _value(spec: TensorSpec, is_batched: bool) -> onnx.ValueInfoProto:
    dims = [f"{spec.name} {axis}" if side == -1 else side for axis, side in enumerate(spec.shape)]
    return helper.make_tensor_value_info(spec.name, _TYPES[spec.datatype], ["N", *dims] if is_batched else dims)
