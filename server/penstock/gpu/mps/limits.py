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
TRITON_CLIENTS = 1  # Triton's own process may have a context, besides its models' processes
_MEMORY = re.compile(r"([0-9]+=)?[1-9][0-9]*[MG]?")


@dataclass(frozen=True, slots=True)
class ModelClients:
    """The number of a model's processes on each card. cards: indexes; empty for all.

    max_rows: largest batch of a process. is_merged: the gateway or Triton forms batches. is_checked: the process
    compares its answers with the CPU's if it gets a part of the SMs. threads: percentage in config.pbtxt, 0 for none.
    """

    model: str
    count: int
    cards: tuple[int, ...] = ()
    max_rows: int = 1
    is_merged: bool = False
    is_checked: bool = False
    threads: int = 0

    def is_on(self, card: int) -> bool:
        """Whether it has processes on the card."""
        return not self.cards or card in self.cards


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
            counts[row.model] += row.count if row.is_on(index) else 0
        total, limit = counts.total() + TRITON_CLIENTS, client_limit(card.capability, reading.cuda)
        if total > limit:
            largest, _ = counts.most_common(1)[0]
            return (
                f"{total} MPS clients on GPU {card.index}, {total - TRITON_CLIENTS} model instances and Triton's own, "
                f"are more than the {limit} that MPS serves on a {card.name}; lower the count of {largest!r} "
                f"({counts[largest]}) in its config.pbtxt's instance_group, or serve fewer with --models"
            )
    return ""


def unlimited(cards: Sequence[GpuDevice]) -> str:
    """Why clients cannot be limited on these cards; empty if they can."""
    old = next((card for card in cards if card.capability < VOLTA), None)
    if old is None:
        return ""
    return f"GPU {old.index} ({old.name}) is older than Volta, where MPS limits no client's threads or memory"


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


def memory_limit_error(text: str) -> str:
    """The mistake in a pinned-memory limit, "4G" or by card "0=4G,1=2G"; empty if it is valid or empty."""
    for limit in filter(None, text.split(",")):
        if not _MEMORY.fullmatch(limit.strip()):
            return f"has {limit.strip()!r}; use 4G or 4096M, or 0=4G,1=2G for each GPU number"
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
