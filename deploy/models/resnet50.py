"""ResNet-50 v1.5 with seeded random weights: the true arithmetic of the network, and no knowledge at all.

He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition" (2015), bottlenecks [3, 4, 6, 3]. v1.5: a stage's
first bottleneck strides in its 3x3 convolution, as torchvision, NVIDIA and MLPerf have it. Every convolution is
followed by a batch normalisation that is its own node.
"""

import sys
from collections.abc import Sequence

import onnx

from deploy.models.graph import Graph, Value
from deploy.models.graph_folder import RandomModel, main
from deploy.models.graph_weights import RandomWeights

NAME = "resnet50-random"
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, bottlenecks
EXPANSION = 4
CLASSES = 1000
BRANCH_GAIN = 0.2  # of a bottleneck's last normalisation: 16 additions would double the activations each otherwise


def resnet50(seed: int) -> tuple[onnx.ModelProto, int]:
    """(the model, how many parameters it has). `image` (N, 3, 224, 224) → `logits` (N, 1000)."""
    graph, weights = Graph("resnet50"), RandomWeights(seed)
    layers = _Layers(graph, weights)
    x = layers.conv(graph.input("image", (3, 224, 224)), 64, 7, name="stem", stride=2)
    x = graph.max_pool(graph.relu(x), 3, name="stem.pool", stride=2, pad=1)
    for stage, (width, count) in enumerate(STAGES, 1):
        for block in range(count):
            stride = 2 if stage > 1 and block == 0 else 1
            x = _bottleneck(layers, x, width, stride, name=f"stage{stage}.{block}")
    x = graph.flatten(graph.global_average_pool(x))
    graph.output(graph.gemm(x, weights.linear(CLASSES, x.shape[0]), weights.bias(CLASSES), name="logits"))
    return graph.model(), graph.parameter_count


def _bottleneck(layers: "_Layers", x: Value, width: int, stride: int, *, name: str) -> Value:
    """1x1, 3x3, 1x1 beside the identity; beside a 1x1 where width or size change."""
    graph, shortcut = layers.graph, x
    if stride != 1 or x.shape[0] != width * EXPANSION:
        shortcut = layers.conv(x, width * EXPANSION, 1, name=f"{name}.shortcut", stride=stride)
    branch = graph.relu(layers.conv(x, width, 1, name=f"{name}.conv1"))
    branch = graph.relu(layers.conv(branch, width, 3, name=f"{name}.conv2", stride=stride))
    branch = layers.conv(branch, width * EXPANSION, 1, name=f"{name}.conv3", gain=BRANCH_GAIN)
    return graph.relu(graph.add(branch, shortcut, name=f"{name}.add"))


class _Layers:
    """Convolution and batch normalisation, as ResNet has them everywhere."""

    def __init__(self, graph: Graph, weights: RandomWeights) -> None:
        self.graph = graph
        self._weights = weights

    def conv(self, x: Value, channels: int, kernel: int, *, name: str, stride: int = 1, gain: float = 1.0) -> Value:
        weight = self._weights.conv(channels, x.shape[0], kernel)
        x = self.graph.conv(x, weight, name=name, stride=stride, pad=kernel // 2)
        return self.graph.batch_norm(x, self._weights.normalisation(channels, gain=gain), name=f"{name}.norm")


MODEL = RandomModel(
    name=NAME,
    title="ResNet-50 v1.5",
    paper="He, Zhang, Ren, Sun, *Deep Residual Learning for Image Recognition*, CVPR 2016; stride in the 3×3 (v1.5)",
    build=resnet50,
    output_name="logits",
    is_softmax_in_graph=False,
)


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    main(MODEL, arguments)


if __name__ == "__main__":
    run(sys.argv[1:])
