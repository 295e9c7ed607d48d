"""The network: convolutions, batch normalisation and ReLU, nothing else; answers at a quarter of the picture's size.

Two outputs a cell: `heatmap`, a logit a class that an object's middle is there, and `distances`, the logarithms of the
distances, in cells, from the cell's middle to the object's left, top, right and bottom edge.
"""

import torch
from torch import nn

WIDTH, HEIGHT, STRIDE = 512, 288, 4
CLASSES, SIDES = 3, 4
_EDGE_CHANNELS = 32


class StreetNetwork(nn.Module):  # type: ignore[misc]  # torch is not installed where the types are checked
    """(n, 3, HEIGHT, WIDTH) in [0, 1], BGR, to (n, CLASSES, H / 4, W / 4) and (n, SIDES, H / 4, W / 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _block(3, 16, stride=2)
        self.quarter = nn.Sequential(_block(16, 24, stride=2), _block(24, 24))
        self.eighth = nn.Sequential(_block(24, 48, stride=2), _block(48, 48))
        self.sixteenth = nn.Sequential(_block(48, 64, stride=2), _block(64, 64))
        self.thirty_second = _block(64, 64, stride=2)
        self.lift_thirty_second = _block(64, 48, size=1)
        self.side_sixteenth = _block(64, 48, size=1)
        self.lift_sixteenth = _block(48, _EDGE_CHANNELS, size=1)
        self.side_eighth = _block(48, _EDGE_CHANNELS, size=1)
        self.lift_eighth = _block(_EDGE_CHANNELS, _EDGE_CHANNELS, size=1)
        self.side_quarter = _block(24, _EDGE_CHANNELS, size=1)
        self.neck = _block(_EDGE_CHANNELS, _EDGE_CHANNELS)
        self.heatmap = nn.Conv2d(_EDGE_CHANNELS, CLASSES, 1)
        self.distances = nn.Conv2d(_EDGE_CHANNELS, SIDES, 1)
        nn.init.constant_(self.heatmap.bias, -4.0)  # one cell in fifty at first, as in the data
        nn.init.constant_(self.distances.bias, 0.7)

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and logarithms, as they come."""
        quarter = self.quarter(self.stem(pictures))
        eighth = self.eighth(quarter)
        sixteenth = self.sixteenth(eighth)
        deep = doubled(self.lift_thirty_second(self.thirty_second(sixteenth))) + self.side_sixteenth(sixteenth)
        deep = doubled(self.lift_sixteenth(deep)) + self.side_eighth(eighth)
        deep = doubled(self.lift_eighth(deep)) + self.side_quarter(quarter)
        deep = self.neck(deep)
        return self.heatmap(deep), self.distances(deep)


def doubled(maps: torch.Tensor) -> torch.Tensor:
    """Nearest neighbours at twice the size. By copies: the gradient of torch's own is not deterministic on a GPU."""
    count, channels, rows, columns = maps.shape
    wide = maps[:, :, :, None, :, None].expand(count, channels, rows, 2, columns, 2)
    return wide.reshape(count, channels, rows * 2, columns * 2)


def folded(block: nn.Sequential) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and bias of one convolution that does what the block's convolution and normalisation do."""
    convolution, normalisation = block[0], block[1]
    gain = normalisation.weight.double() / torch.sqrt(normalisation.running_var.double() + normalisation.eps)
    bias = normalisation.bias.double() - normalisation.running_mean.double() * gain
    return (convolution.weight.double() * gain[:, None, None, None]).float(), bias.float()


def _block(inputs: int, outputs: int, *, size: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))
