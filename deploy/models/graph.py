"""ONNX graphs node by node, without a framework: the caller brings the weights, the graph keeps the shapes.

Every tensor has a free batch dimension N, which is not written in its shape: the first one, and the numbers are
float32, unless the Value says otherwise. Opset 17 and IR 8, so that every ONNX Runtime and TensorRT of the Triton
images that the project names can read the file.

    graph = Graph("tiny")
    image = graph.input("image", (3, 32, 32))
    features = graph.relu(graph.conv(image, weight, bias, name="stem", stride=2, pad=1))
    graph.output(graph.gemm(graph.flatten(graph.global_average_pool(features)), matrix, offset, name="head"))
    onnx.save(graph.model(), "model.onnx")
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from deploy.models.graph_weights import FloatArray, Normalisation

OPSET = 17
IR_VERSION = 8
PRODUCER = "penstock"

Shape = tuple[int, ...]
Attribute = int | float | str | Sequence[int] | Sequence[float] | onnx.GraphProto


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a graph. shape: without the batch dimension, (C, H, W) for an image.

    datatype: a TensorProto.DataType. batch_axis: where N stands, None for a tensor of no batch.
    """

    name: str
    shape: Shape
    datatype: int = TensorProto.FLOAT
    batch_axis: int | None = 0

    @property
    def dims(self) -> list[int | str]:
        """With the batch dimension."""
        at = self.batch_axis
        return [*self.shape] if at is None else [*self.shape[:at], "N", *self.shape[at:]]


class Graph:
    """An ONNX graph under construction. A node without a name is named after its input; its output has the node's name.

    parameter_count: what was learned: weights, biases, scales; not the running means and variances.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.parameter_count = 0
        self._inputs: list[Value] = []
        self._outputs: list[Value] = []
        self._inner: dict[str, Value] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}

    def input(self, name: str, shape: Shape) -> Value:
        """An input of the graph, as `take` has it for any Value."""
        return self.take(Value(name, shape))

    def take(self, value: Value) -> Value:
        """The value becomes an input of the graph."""
        self._inputs.append(value)
        return value

    def output(self, value: Value) -> None:
        """The value becomes an output of the graph, under its own name."""
        self._outputs.append(value)
        self._inner.pop(value.name)

    def conv(
        self, x: Value, weight: FloatArray, bias: FloatArray | None = None, *, name: str, stride: int = 1, pad: int = 0
    ) -> Value:
        """weight (out, in / groups, kernel, kernel), bias (out,); x (in, H, W), whose channels tell the groups."""
        out_channels, in_channels, *kernel = weight.shape
        group, rest = divmod(x.shape[0], in_channels)
        if rest or out_channels % group:
            raise ValueError(f"{name}: a weight of {weight.shape} does not fit the {x.shape[0]} channels of {x.name}")
        sides = [_side(side, k, stride, 2 * pad) for side, k in zip(x.shape[1:], kernel, strict=True)]
        operands = [self._learned(f"{name}.weight", weight)]
        operands += [self._learned(f"{name}.bias", bias)] if bias is not None else []
        return self.node(
            "Conv", [x, *operands], (out_channels, *sides), name=name,
            kernel_shape=kernel, strides=[stride] * 2, pads=[pad] * 4, group=group,
        )  # fmt: skip

    def batch_norm(self, x: Value, facts: Normalisation, *, name: str) -> Value:
        """As a node of its own: folding it into the convolution before it is the runtime's business."""
        operands = [
            self._learned(f"{name}.scale", facts.scale),
            self._learned(f"{name}.bias", facts.bias),
            self.constant(f"{name}.mean", facts.mean),
            self.constant(f"{name}.variance", facts.variance),
        ]
        return self.node("BatchNormalization", [x, *operands], x.shape, name=name, epsilon=facts.epsilon)

    def gemm(self, x: Value, weight: FloatArray, bias: FloatArray, *, name: str) -> Value:
        """weight (out, in), bias (out,); x (in,)."""
        operands = [self._learned(f"{name}.weight", weight), self._learned(f"{name}.bias", bias)]
        return self.node("Gemm", [x, *operands], (len(bias),), name=name, transB=1)

    def relu(self, x: Value) -> Value:
        return self.node("Relu", [x], x.shape, name=f"{x.name}.relu")

    def softmax(self, x: Value, *, name: str, axis: int = 1) -> Value:
        """axis: counted with the batch dimension, so 1 is the first of x.shape."""
        return self.node("Softmax", [x], x.shape, name=name, axis=axis)

    def add(self, one: Value, other: Value, *, name: str) -> Value:
        """Of equal shapes."""
        if one.shape != other.shape:
            raise ValueError(f"{name}: {one.name} is {one.shape}, {other.name} is {other.shape}")
        return self.node("Add", [one, other], one.shape, name=name)

    def concat(self, values: Sequence[Value], *, name: str) -> Value:
        """Along the first dimension after the batch: channels of images."""
        channels = sum(value.shape[0] for value in values)
        return self.node("Concat", values, (channels, *values[0].shape[1:]), name=name, axis=1)

    def max_pool(
        self, x: Value, kernel: int, *, name: str, stride: int = 1, pad: int = 0, is_ceil: bool = False
    ) -> Value:
        """is_ceil: a last window that hangs over the edge counts, as in Caffe."""
        sides = [_side(side, kernel, stride, 2 * pad, is_ceil=is_ceil) for side in x.shape[1:]]
        return self.node(
            "MaxPool", [x], (x.shape[0], *sides), name=name,
            kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, ceil_mode=int(is_ceil),
        )  # fmt: skip

    def global_average_pool(self, x: Value) -> Value:
        """(C, H, W) to (C, 1, 1)."""
        return self.node("GlobalAveragePool", [x], (x.shape[0], 1, 1), name=f"{x.name}.mean")

    def lrn(self, x: Value, *, name: str, size: int = 5, alpha: float = 1e-4, beta: float = 0.75) -> Value:
        """Local response normalisation across channels; the defaults are those of AlexNet and GoogLeNet."""
        return self.node("LRN", [x], x.shape, name=name, size=size, alpha=alpha, beta=beta, bias=1.0)

    def flatten(self, x: Value) -> Value:
        return self.node("Flatten", [x], (math.prod(x.shape),), name=f"{x.name}.flat", axis=1)

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> str:
        """The name of an operand that is not learned, of any type and with all its dimensions: for `node`."""
        if name in self._initializers:
            raise ValueError(f"there is a constant {name} already")
        self._initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def has_constant(self, name: str) -> bool:
        return name in self._initializers

    def node(
        self, op_type: str, operands: Sequence[Value | str], shape: Shape, *, name: str, **attributes: Attribute
    ) -> Value:
        """Any operator of the opset with one float32 output. operands: values, and names of constants ("": not given);
        shape: of the output."""
        return self.nodes(op_type, operands, [Value(name, shape)], **attributes)[0]

    def nodes(
        self, op_type: str, operands: Sequence[Value | str], outputs: Sequence[Value], **attributes: Attribute
    ) -> Sequence[Value]:
        """Any operator with these outputs, named after the first of them; one without a name is not wanted."""
        wanted = [value for value in outputs if value.name]
        for value in wanted:
            if value.name in self._inner:
                raise ValueError(f"there is a node {value.name} already")
            self._inner[value.name] = value
        names = [operand if isinstance(operand, str) else operand.name for operand in operands]
        node = helper.make_node(op_type, names, [value.name for value in outputs], name=wanted[0].name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self._nodes.append(node)
        return outputs

    def graph(self) -> onnx.GraphProto:
        """The graph alone, as the body of another one's loop: that one's values may stand in it by name."""
        return helper.make_graph(
            self._nodes,
            self.name,
            [_value_info(value) for value in self._inputs],
            [_value_info(value) for value in self._outputs],
            list(self._initializers.values()),
            value_info=[_value_info(value) for value in self._inner.values()],
        )

    def model(self) -> onnx.ModelProto:
        """The model, checked in full: onnx's own shape inference must find the shapes that stand here."""
        opsets = [helper.make_opsetid("", OPSET)]
        model = helper.make_model(self.graph(), opset_imports=opsets, ir_version=IR_VERSION, producer_name=PRODUCER)
        onnx.checker.check_model(model, full_check=True)
        return model

    def _learned(self, name: str, array: FloatArray) -> str:
        self.parameter_count += array.size
        return self.constant(name, array)


def multiply_accumulates(model: onnx.ModelProto) -> int:
    """Of the convolutions and matrix products for one row of input; what else there is costs little and is not counted.

    Every tensor's shape must stand in the model, as `Graph.model` and onnx.shape_inference write them.
    """
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    shapes = {value.name: _shape(value) for value in (*model.graph.value_info, *model.graph.output)}
    total = 0
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            weight = weights[node.input[1]]
            total += math.prod(weight) * math.prod(shapes[node.output[0]][2:])
    return total


def _side(side: int, kernel: int, stride: int, padding: int, *, is_ceil: bool = False) -> int:
    steps = (side + padding - kernel) / stride
    return (math.ceil(steps) if is_ceil else math.floor(steps)) + 1


def _value_info(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, value.datatype, value.dims)


def _shape(value: onnx.ValueInfoProto) -> Shape:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
