"""Trains the network: `python -m deploy.models.street.train --out FILE.pt`. Wants PyTorch; takes a GPU if there is one.

Everything comes from --seed: the scenes, the first weights, the order, the flips. The same seed on the same hardware
and versions gives the same weights, bit by bit.
"""

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from deploy.models.street.network import HEIGHT, STRIDE, WIDTH, StreetNetwork, Targets, loss_of
from deploy.models.street.scene import NO_OBJECT, Scenes, render_scenes
from deploy.models.street.stage import Progress, print_line

SEED = 1
_WEIGHT_DECAY = 1e-4
_WARM_UP = 300  # steps
_AVERAGING = 0.998  # of the weights, over steps


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and with what to train."""

    seed: int = SEED
    scenes: int = 22_000
    epochs: int = 90
    batch_size: int = 128
    learning_rate: float = 4e-3
    processes: int = 2


def train(plan: Plan, device: str) -> StreetNetwork:
    """The averaged network after the last step, on the CPU, in evaluation mode. Prints progress."""
    _be_deterministic(plan.seed)
    scenes = render_scenes(plan.seed, plan.scenes, (WIDTH, HEIGHT), processes=plan.processes)
    network = StreetNetwork().to(device, memory_format=torch.channels_last)
    averaged = torch.optim.swa_utils.AveragedModel(
        network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(_AVERAGING), use_buffers=True
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=plan.learning_rate, weight_decay=_WEIGHT_DECAY)
    data = _on_device(scenes, device)
    generator = np.random.default_rng(plan.seed)
    steps_an_epoch = plan.scenes // plan.batch_size
    progress = Progress(plan.epochs, "epochs", reports=plan.epochs)
    for epoch in range(plan.epochs):
        total = torch.zeros((), device=device)
        order = generator.permutation(plan.scenes)
        for step in range(steps_an_epoch):
            rows = order[step * plan.batch_size : (step + 1) * plan.batch_size]
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * _rate(epoch * steps_an_epoch + step, plan.epochs * steps_an_epoch)
            total += _step(network, optimizer, _batch(data, rows, generator))
            averaged.update_parameters(network)
        progress.reached(epoch + 1, f", loss {total.item() / steps_an_epoch:.4f}")
    finished: StreetNetwork = averaged.module.cpu().eval()
    return finished


@dataclass(frozen=True, slots=True)
class _Data:
    """The scenes where the network is; counts: (n,) how many objects each has, ignored ones included."""

    pictures: torch.Tensor
    boxes: torch.Tensor
    classes: torch.Tensor
    counts: npt.NDArray[np.int64]


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _be_deterministic(seed: int) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads such memory
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = True


def _on_device(scenes: Scenes, device: str) -> _Data:
    """All scenes lie where the network is, as bytes."""
    return _Data(
        torch.from_numpy(scenes.pictures).to(device),
        torch.from_numpy(scenes.boxes).to(device),
        torch.from_numpy(scenes.classes.astype(np.int64)).to(device),
        (scenes.classes != NO_OBJECT).sum(axis=1),
    )


def _batch(data: _Data, rows: npt.NDArray[np.int64], generator: np.random.Generator) -> Batch:
    """Pictures (n, 3, H, W) in [0, 1], half of them mirrored, their colours shifted; boxes and classes with them."""
    device = data.pictures.device
    most = max(int(data.counts[rows].max()), 1)
    index = torch.from_numpy(rows).to(device)
    is_mirrored = torch.from_numpy(generator.random(len(rows)) < 0.5).to(device)
    gains = np.exp(generator.normal(0, 0.12, (len(rows), 1, 1, 1)) + generator.normal(0, 0.04, (len(rows), 3, 1, 1)))
    shifts = generator.normal(0, 0.03, (len(rows), 1, 1, 1))
    chosen = data.pictures[index].permute(0, 3, 1, 2).float() / 255
    chosen = torch.where(is_mirrored[:, None, None, None], chosen.flip(3), chosen)
    chosen = chosen * torch.from_numpy(gains).float().to(device) + torch.from_numpy(shifts).float().to(device)
    own = data.boxes[index, :most]
    mirrored = torch.stack([WIDTH - own[..., 2], own[..., 1], WIDTH - own[..., 0], own[..., 3]], dim=-1)
    own = torch.where(is_mirrored[:, None, None], mirrored, own)
    return chosen.clamp(0, 1).contiguous(memory_format=torch.channels_last), own, data.classes[index, :most]


def _step(network: StreetNetwork, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    pictures, boxes, classes = batch
    targets = Targets(boxes, classes, (HEIGHT // STRIDE, WIDTH // STRIDE))
    with torch.autocast(pictures.device.type, torch.bfloat16, enabled=pictures.is_cuda):
        heat, distances = network(pictures)
    loss = loss_of(heat.float(), distances.float(), targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 10.0)
    optimizer.step()
    return loss.detach()


def _rate(step: int, steps: int) -> float:
    """Of the learning rate: up for a while, then down along a cosine."""
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - _WARM_UP) / max(steps - _WARM_UP, 1))) + 0.002


def main() -> None:
    """Trains as the command line says and writes the weights."""
    default = Plan()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where the weights go, for export")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--scenes", type=int, default=default.scenes)
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="that render")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = Plan(seed=chosen.seed, scenes=chosen.scenes, epochs=chosen.epochs, processes=chosen.processes)
    print_line(f"torch {torch.__version__} on {device}; {plan}")
    network = train(plan, device)
    torch.save(network.state_dict(), chosen.out)
    print_line(f"wrote {chosen.out}")


if __name__ == "__main__":
    main()
