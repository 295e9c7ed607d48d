"""The detector's network and its loss. Needs PyTorch."""

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


_SPREAD = 0.54 / 6  # a Gaussian's deviation, as a share of the object's side
_LEAST_SPREAD = 0.45  # cells
_IGNORED, _EMPTY = -2, -1
_BOX_WEIGHT = 5.0


class Targets:
    """What a perfect network would answer for a batch.

    heat: (n, CLASSES, rows, columns), 1 at an object's middle. counts: the same shape, False where the truth is
    ignored. xyxy: (n, rows, columns, 4) in cells, of the object whose Gaussian is strongest there; weight: (n, rows,
    columns), how much that box matters.
    """

    def __init__(self, boxes: torch.Tensor, classes: torch.Tensor, shape: tuple[int, int]) -> None:
        """boxes: (n, k, 4) in the network's pixels; classes: (n, k), minus 1 for no object, minus 2 - c for ignored."""
        rows, columns = shape
        boxes = boxes.float() / STRIDE
        low, high = boxes[..., :2], boxes[..., 2:]
        middle, sides = (low + high) / 2, (high - low).clamp(min=0.1)
        cell = torch.minimum(middle.floor(), torch.tensor([columns - 1, rows - 1], device=boxes.device)).clamp(min=0)
        across = torch.arange(columns, device=boxes.device, dtype=torch.float32)
        down = torch.arange(rows, device=boxes.device, dtype=torch.float32)
        spread = (sides * _SPREAD).clamp(min=_LEAST_SPREAD)
        gauss_x = torch.exp(-((across - cell[..., 0, None]) ** 2) / (2 * spread[..., 0, None] ** 2))
        gauss_y = torch.exp(-((down - cell[..., 1, None]) ** 2) / (2 * spread[..., 1, None] ** 2))
        is_real = classes >= 0
        gauss = gauss_y[..., :, None] * gauss_x[..., None, :] * is_real[..., None, None]
        gauss = torch.where(gauss > 0.02, gauss, torch.zeros_like(gauss))
        self.heat = torch.stack([(gauss * (classes == c)[..., None, None]).amax(dim=1) for c in range(CLASSES)], dim=1)
        inside_x = (across + 0.5 > low[..., 0, None]) & (across + 0.5 < high[..., 0, None])
        inside_y = (down + 0.5 > low[..., 1, None]) & (down + 0.5 < high[..., 1, None])
        inside = inside_y[..., :, None] & inside_x[..., None, :]
        ignored = [(inside & (classes == _IGNORED - c)[..., None, None]).any(dim=1) for c in range(CLASSES)]
        self.counts = ~torch.stack(ignored, dim=1) | (self.heat == 1)
        self._choose(boxes, gauss, sides)

    def _choose(self, boxes: torch.Tensor, gauss: torch.Tensor, sides: torch.Tensor) -> None:
        strongest, owner = gauss.max(dim=1)
        total = gauss.sum(dim=(2, 3)).clamp(min=1e-3)
        worth = torch.log(sides[..., 0] * sides[..., 1] + 2.0) / total
        flat = owner.flatten(1)
        self.xyxy = boxes.gather(1, flat[..., None].expand(-1, -1, 4)).view(*owner.shape, 4)
        self.weight = strongest * worth.gather(1, flat).view(owner.shape)


def loss_of(heat: torch.Tensor, distances: torch.Tensor, targets: Targets) -> torch.Tensor:
    """One number. heat, distances: the network's answers for the batch."""
    return _heat_loss(heat, targets) + _BOX_WEIGHT * _box_loss(distances, targets)


def _heat_loss(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Focal loss, less for cells near a middle."""
    chance = torch.sigmoid(logits)
    is_middle = targets.heat == 1
    hit = -nn.functional.logsigmoid(logits) * (1 - chance) ** 2
    false = -nn.functional.logsigmoid(-logits) * chance**2 * (1 - targets.heat) ** 4
    loss = torch.where(is_middle, hit, false) * targets.counts
    return loss.sum() / is_middle.sum().clamp(min=1)


def _box_loss(distances: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Generalised IoU (Rezatofighi et al., CVPR 2019)."""
    found = boxes_of(distances)
    wanted = targets.xyxy
    low, high = torch.maximum(found[..., :2], wanted[..., :2]), torch.minimum(found[..., 2:], wanted[..., 2:])
    shared = _area(low, high)
    union = (_area(found[..., :2], found[..., 2:]) + _area(wanted[..., :2], wanted[..., 2:]) - shared).clamp(min=1e-6)
    low, high = torch.minimum(found[..., :2], wanted[..., :2]), torch.maximum(found[..., 2:], wanted[..., 2:])
    hull = _area(low, high).clamp(min=1e-6)
    miss = 1 - (shared / union - (hull - union) / hull)
    return (miss * targets.weight).sum() / targets.weight.sum().clamp(min=1e-6)


def _area(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Written out: the gradient of prod() takes longer than the whole network's."""
    sides = (high - low).clamp(min=0)
    return sides[..., 0] * sides[..., 1]


def boxes_of(distances: torch.Tensor) -> torch.Tensor:
    """(n, 4, rows, columns) logarithms to (n, rows, columns, 4) xyxy in cells."""
    _, _, rows, columns = distances.shape
    reach = torch.exp(distances.clamp(-4, 5)).permute(0, 2, 3, 1)
    x = (torch.arange(columns, device=distances.device) + 0.5)[None, None, :]
    y = (torch.arange(rows, device=distances.device) + 0.5)[None, :, None]
    return torch.stack([x - reach[..., 0], y - reach[..., 1], x + reach[..., 2], y + reach[..., 3]], dim=-1)
