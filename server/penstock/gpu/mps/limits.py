"""Limits of MPS clients.

docs.nvidia.com/deploy/mps, "Client-Server Connection Limits": 16 contexts per device before Volta, 48 from Volta on, 60
with a driver of CUDA 13.1 or later. Clients have limits and own address spaces from Volta on.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from penstock.gpu.nvml import GpuDevice, NvmlReading

VOLTA = (7, 0)
AUTO: Final = "auto"
_SHARES = (50.0, 25.0, 12.0)  # percent
_TOTAL_SHARE = 200.0  # percent, sum over all clients
TRITON_CLIENTS = 1  # Triton's own process may have a context, besides its models' processes
_MEMORY = re.compile(r"([0-9]+=)?[1-9][0-9]*[MG]?")


@dataclass(frozen=True, slots=True)
class ModelClients:
    """The number of a model's processes on each card. cards: indexes; empty for all."""

    model: str
    count: int
    cards: tuple[int, ...] = ()


def client_limit(capability: tuple[int, int], cuda: tuple[int, int] | None) -> int:
    """Maximum CUDA contexts of MPS on one card. cuda: the driver's version."""
    if capability < VOLTA:
        return 16
    return 60 if cuda is not None and cuda >= (13, 1) else 48


def too_many_clients(wanted: Iterable[ModelClients], reading: NvmlReading) -> str:
    """The problem if a card would get too many clients; else empty."""
    models = tuple(wanted)
    for index, card in enumerate(reading.cards):
        counts: Counter[str] = Counter()
        for row in models:
            counts[row.model] += row.count if not row.cards or index in row.cards else 0
        total, limit = counts.total() + TRITON_CLIENTS, client_limit(card.capability, reading.cuda)
        if total > limit:
            largest, _ = counts.most_common(1)[0]
            return (
                f"{total} MPS clients on card {index}, {total - TRITON_CLIENTS} model instances and Triton's own, are "
                f"more than the {limit} that MPS serves on a {card.name}; lower the count of {largest!r} "
                f"({counts[largest]}) in its config.pbtxt's instance_group, or serve fewer with --models"
            )
    return ""


def unlimited(cards: Sequence[GpuDevice]) -> str:
    """Why clients cannot be limited on these cards; empty if they can."""
    old = next((card for card in cards if card.capability < VOLTA), None)
    if old is None:
        return ""
    return f"card {old.index} ({old.name}) is older than Volta, where MPS limits no client's threads or memory"


def read_percentage(text: object) -> float | Literal["auto"]:
    """Percentage of a card's threads per client, 0 for no limit, or auto. Raises ValueError."""
    if text == AUTO:
        return AUTO
    try:
        share = float(text)  # type: ignore[arg-type]  # float rejects other types
    except (TypeError, ValueError):
        share = -1.0
    if not 0.0 <= share <= 100.0:
        raise ValueError("it takes a percentage up to 100, 0 for no limit, or auto")
    return share


def default_percentage(wanted: Iterable[ModelClients], card_count: int) -> float:
    """NVIDIA's rule for n clients of the fullest card: 100 / (n / 2) percent of its threads; 0 for no limit.

    Only 50, 25 or 12 percent: with other numbers of an H200's SMs, cuDNN returned wrong results
    (torch_serving/trial.py).
    """
    models = tuple(wanted)
    most = max(
        (sum(row.count for row in models if not row.cards or index in row.cards) for index in range(card_count)),
        default=0,
    )
    if most <= 2:
        return 0.0
    return next((step for step in _SHARES if step * most <= _TOTAL_SHARE), _SHARES[-1])


def memory_limit_error(text: str) -> str:
    """The mistake in a pinned-memory limit, "4G" or by card "0=4G,1=2G"; empty if it is valid or empty."""
    for limit in filter(None, text.split(",")):
        if not _MEMORY.fullmatch(limit.strip()):
            return f"has {limit.strip()!r}; it takes 4G or 4096M, or by card 0=4G,1=2G"
    return ""


def memory_by_card(text: str, card_count: int) -> Mapping[int, str]:
    """The limit by card. text: valid."""
    limits: dict[int, str] = {}
    for limit in (part.strip() for part in text.split(",") if part.strip()):
        card, named, size = limit.rpartition("=")
        if named:
            limits[int(card)] = size
        else:
            limits |= dict.fromkeys(range(max(1, card_count)), size)
    return limits
