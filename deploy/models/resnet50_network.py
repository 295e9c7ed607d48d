"""ResNet-50 v1.5 as a PyTorch module: deploy.models.resnet50's network and, of the same seed, its very weights."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from deploy.models.graph_weights import RandomWeights

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, bottlenecks: as in deploy.models.resnet50, which wants onnx
EXPANSION = 4
CLASSES = 1000
BRANCH_GAIN = 0.2
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, in 0 to 255, RGB


class Resnet50(nn.Module):  # type: ignore[misc]  # torch has no types where these are checked
    """Images (N, 3, 224, 224), normalised, to logits (N, 1000). Weights are drawn in the ONNX graph's order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        weights = RandomWeights(seed)
        self.stem = _Unit(weights, 3, 64, kernel=7, stride=2)
        channels = 64
        bottlenecks = []
        for stage, (width, count) in enumerate(STAGES):
            for block in range(count):
                bottlenecks.append(_Bottleneck(weights, channels, width, stride=2 if stage and block == 0 else 1))
                channels = width * EXPANSION
        self.bottlenecks = nn.Sequential(*bottlenecks)
        self.head = nn.Linear(channels, CLASSES)
        _set(self.head.weight, weights.linear(CLASSES, channels))
        _set(self.head.bias, weights.bias(CLASSES))

    def forward(self, image: Any) -> Any:
        x = functional.max_pool2d(functional.relu(self.stem(image)), 3, stride=2, padding=1)
        return self.head(functional.adaptive_avg_pool2d(self.bottlenecks(x), 1).flatten(1))


class OfPixels(nn.Module):  # type: ignore[misc]
    """The network for pixels 0 to 255 as UINT8, RGB: it normalises by itself, and a quarter of the bytes travel."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(MEAN).reshape(1, 3, 1, 1))
        self.register_buffer("factor", 1 / torch.tensor(DEVIATION).reshape(1, 3, 1, 1))

    def forward(self, image: Any) -> Any:
        return self.network((image.to(self.mean.dtype) - self.mean) * self.factor)


class _Unit(nn.Module):  # type: ignore[misc]
    """Convolution and batch normalisation."""

    def __init__(
        self, weights: RandomWeights, inputs: int, outputs: int, *, kernel: int, stride: int = 1, gain: float = 1.0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
        _set(self.conv.weight, weights.conv(outputs, inputs, kernel))
        drawn = weights.normalisation(outputs, gain=gain)
        self.norm = nn.BatchNorm2d(outputs, eps=drawn.epsilon)
        _set(self.norm.weight, drawn.scale)
        _set(self.norm.bias, drawn.bias)
        _set(self.norm.running_mean, drawn.mean)
        _set(self.norm.running_var, drawn.variance)

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x))


class _Bottleneck(nn.Module):  # type: ignore[misc]
    """1x1, 3x3 (which strides), 1x1 beside the identity; beside a 1x1 where width or size change."""

    def __init__(self, weights: RandomWeights, inputs: int, width: int, *, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        has_shortcut = stride != 1 or inputs != outputs
        self.shortcut = _Unit(weights, inputs, outputs, kernel=1, stride=stride) if has_shortcut else nn.Identity()
        self.first = _Unit(weights, inputs, width, kernel=1)
        self.second = _Unit(weights, width, width, kernel=3, stride=stride)
        self.third = _Unit(weights, width, outputs, kernel=1, gain=BRANCH_GAIN)

    def forward(self, x: Any) -> Any:
        branch = functional.relu(self.second(functional.relu(self.first(x))))
        return functional.relu(self.third(branch) + self.shortcut(x))


def _set(tensor: Any, values: Any) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)))
