"""YOLOX-S as a PyTorch module, written from its paper, with seeded random weights.

Source: Ge et al., *YOLOX: Exceeding YOLO Series in 2021*, arXiv 2107.08430: CSPDarknet of depth 0.33 and width 0.5,
SPP, PAFPN and the decoupled head. The first layer, Focus (four shifted half-size images and a 3x3 convolution), is
written as the 6x6 convolution of stride 2 that computes the same.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from deploy.models.graph_weights import RandomWeights

SIDE, CLASSES = 640, 80
STRIDES = (8, 16, 32)
BOX_COLUMNS = 5  # centre x and y, width, height, objectness
_STEM, _HEAD = 32, 128  # channels
_STAGES = ((64, 1), (128, 3), (256, 3), (512, 1))  # channels, bottlenecks
_POOLS = (5, 9, 13)
_OBJECTNESS_BIAS, _CLASS_BIAS = -4.0, -1.0  # few of the 8,400 scores exceed 0.25
_BOX_GAIN = 0.4
_GAIN = 0.5  # of the normalisations: a street's frames have about 50 boxes, before NMS
_BLOCKS, _PATCHES = 40, 4  # a side of the image that statistics are taken of


class YoloxS(nn.Module):  # type: ignore[misc]  # torch has no types where these are checked
    """BGR pixels 0 to 255 (N, 3, 640, 640) to rows (N, 8400, 85), as the layout `yolox`: boxes relative to their cells,
    objectness, a score per class."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        weights = RandomWeights(seed)
        self.stem = _Unit(weights, 3, _STEM, kernel=6, stride=2, padding=2)
        stages, channels = [], _STEM
        for number, (width, count) in enumerate(_STAGES):
            is_last = number == len(_STAGES) - 1
            unit = _Unit(weights, channels, width, kernel=3, stride=2)
            pools = [_PoolPyramid(weights, width)] if is_last else []
            stages.append(nn.Sequential(unit, *pools, _Stage(weights, width, width, count, has_sum=not is_last)))
            channels = width
        self.stages = nn.ModuleList(stages)
        self.to_middle, self.to_small = _Unit(weights, 512, 256), _Unit(weights, 256, 128)
        self.down_middle, self.down_small = _Stage(weights, 512, 256, 1), _Stage(weights, 256, 128, 1)
        self.from_small = _Unit(weights, 128, 128, kernel=3, stride=2)
        self.from_middle = _Unit(weights, 256, 256, kernel=3, stride=2)
        self.up_middle, self.up_large = _Stage(weights, 256, 256, 1), _Stage(weights, 512, 512, 1)
        self.heads = nn.ModuleList([_Head(weights, width) for width in (128, 256, 512)])
        self._take_statistics(seed)

    def _take_statistics(self, seed: int) -> None:
        """Sets the normalisations' means and variances from an image with patches of coloured blocks."""
        generator = torch.Generator().manual_seed(seed)
        image = 255 * _blocks(generator, 3, _BLOCKS).round()
        image = torch.lerp(torch.full_like(image, 114.0), image, _blocks(generator, 1, _PATCHES).round())
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 1.0
        with torch.no_grad():
            self.train()(image)
        self.eval()

    def forward(self, image: Any) -> Any:
        maps, x = [], self.stem(image)
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        large = self.to_middle(maps[3])
        middle = self.to_small(self.down_middle(torch.cat([_doubled(large), maps[2]], 1)))
        small = self.down_small(torch.cat([_doubled(middle), maps[1]], 1))
        middle = self.up_middle(torch.cat([self.from_small(small), middle], 1))
        large = self.up_large(torch.cat([self.from_middle(middle), large], 1))
        rows = [head(level).flatten(2) for head, level in zip(self.heads, (small, middle, large), strict=True)]
        return torch.cat(rows, 2).permute(0, 2, 1)


class TopRows(nn.Module):  # type: ignore[misc]
    """The rows with the best scores, (N, count, 6), as the layout `deepstream-yolo`: xyxy in pixels, score, class.

    Boxes are decoded in float64, because half precision has steps of half a pixel beyond 512; cells are whole numbers.
    """

    def __init__(self, network: nn.Module, count: int) -> None:
        super().__init__()
        self.network, self.count = network, count
        cells = []
        for stride in STRIDES:
            line = torch.arange(SIDE // stride, dtype=torch.float32)
            y, x = torch.meshgrid(line, line, indexing="ij")
            cells.append(torch.stack([x, y, torch.full_like(x, stride)], 2).reshape(-1, 3))
        self.register_buffer("cells", torch.cat(cells))

    def forward(self, image: Any) -> Any:
        rows = self.network(image)
        best, number = rows[..., BOX_COLUMNS:].max(2)
        score, place = (best * rows[..., 4]).topk(self.count, 1)
        box = rows[..., :4].gather(1, place.unsqueeze(2).expand(-1, -1, 4)).double()
        cell = self.cells[place].double()
        centre = (box[..., :2] + cell[..., :2]) * cell[..., 2:]
        half = box[..., 2:].exp() * cell[..., 2:] / 2
        facts = torch.stack([score.double(), number.gather(1, place).double()], 2)
        return torch.cat([centre - half, centre + half, facts], 2)


class AsFloats(nn.Module):  # type: ignore[misc]
    """The network for UINT8 pixels: a quarter of the bytes travel."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Any) -> Any:
        return self.network(image.to(torch.float32))


def _blocks(generator: Any, channels: int, count: int) -> Any:
    """(1, channels, SIDE, SIDE) of count blocks a side, each of one value in [0, 1)."""
    return functional.interpolate(torch.rand((1, channels, count, count), generator=generator), (SIDE, SIDE))


def _doubled(x: Any) -> Any:
    return functional.interpolate(x, scale_factor=2.0, mode="nearest")


class _Unit(nn.Module):  # type: ignore[misc]
    """Convolution, batch normalisation and SiLU."""

    def __init__(
        self,
        weights: RandomWeights,
        inputs: int,
        outputs: int,
        *,
        kernel: int = 1,
        stride: int = 1,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        _set(self.conv.weight, weights.conv(outputs, inputs, kernel))
        drawn = weights.normalisation(outputs, gain=_GAIN)
        self.norm = nn.BatchNorm2d(outputs, eps=drawn.epsilon)
        _set(self.norm.weight, drawn.scale)
        _set(self.norm.bias, drawn.bias)

    def forward(self, x: Any) -> Any:
        return functional.silu(self.norm(self.conv(x)))


class _Bottleneck(nn.Module):  # type: ignore[misc]
    """1x1 and 3x3, added to the input if has_sum."""

    def __init__(self, weights: RandomWeights, channels: int, *, has_sum: bool) -> None:
        super().__init__()
        self.first, self.second = _Unit(weights, channels, channels), _Unit(weights, channels, channels, kernel=3)
        self.has_sum = has_sum

    def forward(self, x: Any) -> Any:
        branch = self.second(self.first(x))
        return branch + x if self.has_sum else branch


class _Stage(nn.Module):  # type: ignore[misc]
    """CSP: half of the channels go through the bottlenecks, half pass by; a 1x1 joins them."""

    def __init__(self, weights: RandomWeights, inputs: int, outputs: int, count: int, *, has_sum: bool = False) -> None:
        super().__init__()
        half = outputs // 2
        self.into, self.beside = _Unit(weights, inputs, half), _Unit(weights, inputs, half)
        self.bottlenecks = nn.Sequential(*(_Bottleneck(weights, half, has_sum=has_sum) for _ in range(count)))
        self.join = _Unit(weights, 2 * half, outputs)

    def forward(self, x: Any) -> Any:
        return self.join(torch.cat([self.bottlenecks(self.into(x)), self.beside(x)], 1))


class _PoolPyramid(nn.Module):  # type: ignore[misc]
    """SPP: the map and its maxima in windows of three sizes, joined by a 1x1."""

    def __init__(self, weights: RandomWeights, channels: int) -> None:
        super().__init__()
        self.into, self.join = _Unit(weights, channels, channels // 2), _Unit(weights, 2 * channels, channels)

    def forward(self, x: Any) -> Any:
        x = self.into(x)
        return self.join(torch.cat([x, *(functional.max_pool2d(x, side, 1, side // 2) for side in _POOLS)], 1))


class _Head(nn.Module):  # type: ignore[misc]
    """One level's decoupled head: (N, 85, h, w)."""

    def __init__(self, weights: RandomWeights, channels: int) -> None:
        super().__init__()
        self.stem = _Unit(weights, channels, _HEAD)
        self.classes = nn.Sequential(*(_Unit(weights, _HEAD, _HEAD, kernel=3) for _ in range(2)))
        self.boxes = nn.Sequential(*(_Unit(weights, _HEAD, _HEAD, kernel=3) for _ in range(2)))
        self.score = _predictor(weights, CLASSES, _CLASS_BIAS)
        self.box = _predictor(weights, 4, 1.0, _BOX_GAIN)
        self.objectness = _predictor(weights, 1, _OBJECTNESS_BIAS)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        boxes = self.boxes(x)
        return torch.cat([self.box(boxes), self.objectness(boxes).sigmoid(), self.score(self.classes(x)).sigmoid()], 1)


def _predictor(weights: RandomWeights, outputs: int, bias: float, gain: float = 1.0) -> Any:
    layer = nn.Conv2d(_HEAD, outputs, 1)
    drawn = weights.linear(outputs, _HEAD) * np.float32(gain)
    _set(layer.weight, drawn.reshape(outputs, _HEAD, 1, 1))
    _set(layer.bias, weights.bias(outputs) + np.float32(bias))
    return layer


def _set(tensor: Any, values: Any) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)))
