"""GoogLeNet as a PyTorch module: deploy.models.googlenet's network and, of the same seed, its very weights."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from deploy.models.graph_weights import RandomWeights

CLASSES = 1000
STAGES = (  # as in deploy.models.googlenet, which wants onnx: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool of each block
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
LRN_SIZE, LRN_ALPHA, LRN_BETA = 5, 1e-4, 0.75


class GoogLeNet(nn.Module):  # type: ignore[misc]  # torch has no types where these are checked
    """Images (N, 3, 224, 224), normalised, to (N, 1000) shares that add up to 1.

    Weights are drawn in the ONNX graph's order.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        weights = RandomWeights(seed)
        self.stem = _Unit(weights, 3, 64, kernel=7, stride=2)
        self.stem_norm = ResponseNorm(64)
        self.reduce, self.widen = _Unit(weights, 64, 64, kernel=1), _Unit(weights, 64, 192, kernel=3)
        self.widen_norm = ResponseNorm(192)
        channels = 192
        stages = []
        for widths_of_stage in STAGES:
            blocks = []
            for widths in widths_of_stage:
                blocks.append(_Inception(weights, channels, widths))
                channels = widths[0] + widths[2] + widths[4] + widths[5]
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(channels, CLASSES)
        _set(self.head.weight, weights.linear(CLASSES, channels))
        _set(self.head.bias, weights.bias(CLASSES))

    def forward(self, image: Any) -> Any:
        x = self.stem_norm(_shrink(self.stem(image)))
        x = self.widen_norm(self.widen(self.reduce(x)))
        for stage in self.stages:
            x = stage(_shrink(x))
        return functional.softmax(self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1)), dim=1)


class ResponseNorm(nn.Module):  # type: ignore[misc]
    """Local response normalisation over five channels, x / (1 + alpha / 5 * sum of squares) ** beta, fit for FP16.

    Numbers are made smaller before they are squared, so that FP16 overflows above 25,000 and not at 256; what is lost
    of small ones is lost beside the 1. The sum over neighbours is a 1x1 convolution with a band of ones, which tensor
    cores do: PyTorch's own pads and pools in three dimensions.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        place = torch.arange(channels)
        band = ((place[:, None] - place[None, :]).abs() <= LRN_SIZE // 2).float()
        self.register_buffer("band", band.reshape(channels, channels, 1, 1))
        self.register_buffer("one", torch.ones(channels))
        self.scale = (LRN_ALPHA / LRN_SIZE) ** 0.5

    def forward(self, x: Any) -> Any:
        squares = (x * self.scale).square()
        return x * functional.conv2d(squares, self.band, self.one).pow(-LRN_BETA)


class _Unit(nn.Module):  # type: ignore[misc]
    """Convolution, bias and ReLU: one call of cuDNN's on a GPU."""

    def __init__(self, weights: RandomWeights, inputs: int, outputs: int, *, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2)
        _set(self.conv.weight, weights.conv(outputs, inputs, kernel))
        _set(self.conv.bias, weights.bias(outputs))

    def forward(self, x: Any) -> Any:
        return functional.relu(self.conv(x))


class _Inception(nn.Module):  # type: ignore[misc]
    """Four branches over the same input, side by side. The reductions are drawn first, as in the ONNX graph."""

    def __init__(self, weights: RandomWeights, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        ones, threes_reduce, threes, fives_reduce, fives, pool = widths
        self.threes_reduce = _Unit(weights, inputs, threes_reduce, kernel=1)
        self.fives_reduce = _Unit(weights, inputs, fives_reduce, kernel=1)
        self.ones = _Unit(weights, inputs, ones, kernel=1)
        self.threes = _Unit(weights, threes_reduce, threes, kernel=3)
        self.fives = _Unit(weights, fives_reduce, fives, kernel=5)
        self.pool = _Unit(weights, inputs, pool, kernel=1)

    def forward(self, x: Any) -> Any:
        pooled = functional.max_pool2d(x, 3, stride=1, padding=1)
        threes, fives = self.threes(self.threes_reduce(x)), self.fives(self.fives_reduce(x))
        return torch.cat([self.ones(x), threes, fives, self.pool(pooled)], dim=1)


def _shrink(x: Any) -> Any:
    return functional.max_pool2d(x, 3, stride=2, ceil_mode=True)


def _set(tensor: Any, values: Any) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)))
