"""GoogLeNet (Inception v1) with seeded random weights: the true arithmetic of the network, and no knowledge at all.

Szegedy et al., "Going Deeper with Convolutions" (2014), table 1: nine inception blocks, local response normalisation as
published, no batch normalisation (that came with v2), biases everywhere. Without the two auxiliary heads and the
dropout, which only training has. Padding and the pools that round up are those of Caffe's bvlc_googlenet, with whose
parameter count it agrees.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import onnx

from deploy.models.graph import Graph, Value
from deploy.models.graph_folder import RandomModel, main
from deploy.models.graph_weights import RandomWeights

NAME = "googlenet-random"
CLASSES = 1000


class Inception(NamedTuple):
    """A row of the paper's table 1: the channels of each convolution of a block."""

    ones: int
    threes_reduce: int
    threes: int
    fives_reduce: int
    fives: int
    pool: int


STAGES: tuple[dict[str, Inception], ...] = (
    {"3a": Inception(64, 96, 128, 16, 32, 32), "3b": Inception(128, 128, 192, 32, 96, 64)},
    {
        "4a": Inception(192, 96, 208, 16, 48, 64),
        "4b": Inception(160, 112, 224, 24, 64, 64),
        "4c": Inception(128, 128, 256, 24, 64, 64),
        "4d": Inception(112, 144, 288, 32, 64, 64),
        "4e": Inception(256, 160, 320, 32, 128, 128),
    },
    {"5a": Inception(256, 160, 320, 32, 128, 128), "5b": Inception(384, 192, 384, 48, 128, 128)},
)


def googlenet(seed: int) -> tuple[onnx.ModelProto, int]:
    """(the model, how many parameters it has). `image` (N, 3, 224, 224) → `prob` (N, 1000), which add up to 1."""
    graph, weights = Graph("googlenet"), RandomWeights(seed)
    layers = _Layers(graph, weights)
    x = layers.conv(graph.input("image", (3, 224, 224)), 64, 7, name="conv1", stride=2)
    x = graph.lrn(layers.shrink(x, name="pool1"), name="norm1")
    x = layers.conv(layers.conv(x, 64, 1, name="conv2.reduce"), 192, 3, name="conv2")
    x = graph.lrn(x, name="norm2")
    for number, stage in enumerate(STAGES, 2):
        x = layers.shrink(x, name=f"pool{number}")
        for name, widths in stage.items():
            x = _inception(layers, x, widths, name=f"inception{name}")
    x = graph.flatten(graph.global_average_pool(x))
    x = graph.gemm(x, weights.linear(CLASSES, x.shape[0]), weights.bias(CLASSES), name="classifier")
    graph.output(graph.softmax(x, name="prob"))
    return graph.model(), graph.parameter_count


def _inception(layers: "_Layers", x: Value, widths: Inception, *, name: str) -> Value:
    """Four branches over the same input, side by side."""
    threes = layers.conv(x, widths.threes_reduce, 1, name=f"{name}.3x3.reduce")
    fives = layers.conv(x, widths.fives_reduce, 1, name=f"{name}.5x5.reduce")
    pooled = layers.graph.max_pool(x, 3, name=f"{name}.pool", pad=1)
    branches = [
        layers.conv(x, widths.ones, 1, name=f"{name}.1x1"),
        layers.conv(threes, widths.threes, 3, name=f"{name}.3x3"),
        layers.conv(fives, widths.fives, 5, name=f"{name}.5x5"),
        layers.conv(pooled, widths.pool, 1, name=f"{name}.pool.1x1"),
    ]
    return layers.graph.concat(branches, name=name)


class _Layers:
    """Convolution, bias and ReLU, and the pool between stages, as GoogLeNet has them everywhere."""

    def __init__(self, graph: Graph, weights: RandomWeights) -> None:
        self.graph = graph
        self._weights = weights

    def conv(self, x: Value, channels: int, kernel: int, *, name: str, stride: int = 1) -> Value:
        weight = self._weights.conv(channels, x.shape[0], kernel)
        bias = self._weights.bias(channels)
        return self.graph.relu(self.graph.conv(x, weight, bias, name=name, stride=stride, pad=kernel // 2))

    def shrink(self, x: Value, *, name: str) -> Value:
        return self.graph.max_pool(x, 3, name=name, stride=2, is_ceil=True)


MODEL = RandomModel(
    name=NAME,
    title="GoogLeNet (Inception v1)",
    paper="Szegedy et al., *Going Deeper with Convolutions*, CVPR 2015, without the auxiliary heads, with LRN",
    build=googlenet,
    output_name="prob",
    is_softmax_in_graph=True,
)


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    main(MODEL, arguments)


if __name__ == "__main__":
    run(sys.argv[1:])
