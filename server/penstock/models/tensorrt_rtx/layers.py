"""The layers of an engine, and which ONNX nodes each of them holds: the fusion table.

The builder writes the layers to its log, in the text format of TensorRT's engine inspector. The inspector itself
cannot be used here: it needs a loaded engine, and loading one needs a GPU's driver.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LOG_BEGIN = "Layers:\n"  # of the builder's message
CONTROL = frozenset({"signal", "wait", "shape_call"})  # they order streams and compute shapes, not tensors
_LAYER = re.compile(
    r"(?m)^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: .*?, Outputs: \[(?P<outputs>.*?)\], "
    r"TacticName: .*?, StreamId: \d+(?:, EventId: \d+)?, Metadata: (?P<nodes>.*)$"
)
_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=\x1f|$)")  # U+001F between them
_OWN_NAME, _PART = re.compile(r"__myl_(\w+?)_myl\d"), re.compile(r"[A-Z][a-z0-9]*")
_TENSOR = re.compile(r"Dimensions: (\[[^\]]*\]), .*?Datatype: (\w+), Format: \((\w+)\)")


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """A node of the ONNX graph. name: TensorRT's for a node without one."""

    name: str
    operator: str


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """A layer of the engine. nodes: ONNX nodes that it holds, in the graph's order; empty if TensorRT names none.

    kind: TensorRT's layer type. outputs: "Float [-1,16,208,208] NHWC", one a tensor.
    """

    name: str
    kind: str
    nodes: tuple[OnnxNode, ...]
    outputs: tuple[str, ...]

    @property
    def operators(self) -> tuple[str, ...]:
        """Of ONNX."""
        return tuple(node.operator for node in self.nodes)

    @property
    def own_operators(self) -> tuple[str, ...]:
        """TensorRT's own, by the layer's name, of a layer without nodes: Fc, Mul, Add, Relu of __myl_FcMulAddRelu_…

        A matrix product that TensorRT made of a convolution is such a layer, and so is a change of the memory layout.
        """
        found = None if self.nodes else _OWN_NAME.match(self.name)
        return tuple(_PART.findall(found[1])) if found is not None else ()


@dataclass(frozen=True, slots=True)
class FusedPattern:
    """Layers that hold the same operators in the same order. own_operators: where they name no ONNX nodes."""

    operators: tuple[str, ...]
    own_operators: tuple[str, ...]
    layers: int


@dataclass(frozen=True, slots=True)
class FusionTable:
    """node_count: of the ONNX graph, without constants. layers: without those of CONTROL, which are only counted.

    folded: nodes that no layer names, by operator: TensorRT computed them when it built the engine, does not need them,
    or merged them into a layer without names.
    """

    node_count: int
    layers: tuple[EngineLayer, ...]
    control_count: int
    folded: dict[str, int]

    @property
    def patterns(self) -> tuple[FusedPattern, ...]:
        """By number of layers, the most frequent first."""
        counts = Counter((layer.operators, layer.own_operators) for layer in self.layers)
        return tuple(FusedPattern(*operators, count) for operators, count in counts.most_common())

    @property
    def fused_count(self) -> int:
        """Layers of more than one operator."""
        return sum(len(layer.operators) > 1 or len(layer.own_operators) > 1 for layer in self.layers)


def read_layers(text: str, nodes: Sequence[OnnxNode]) -> FusionTable:
    """The table of the inspector's text. nodes: of the graph, in its order. Raises ValueError if no layer is found."""
    by_name = {node.name: (number, node) for number, node in enumerate(nodes)}
    layers, control_count = list[EngineLayer](), 0
    for found in _LAYER.finditer(text):
        if found["kind"] in CONTROL:
            control_count += 1
            continue
        names = [name for name in dict.fromkeys(_NODE.findall(found["nodes"])) if name in by_name]
        held = sorted(by_name[name] for name in names)
        outputs = tuple(" ".join((kind, dims, form)) for dims, kind, form in _TENSOR.findall(found["outputs"]))
        layers.append(EngineLayer(found["name"], found["kind"], tuple(node for _, node in held), outputs))
    if not layers:
        raise ValueError("the builder's log names no layer")
    placed = {node.name for layer in layers for node in layer.nodes}
    counted = [node for node in nodes if node.operator != "Constant"]
    folded = Counter(node.operator for node in counted if node.name not in placed)
    return FusionTable(len(counted), tuple(layers), control_count, dict(folded.most_common()))
