"""Chooses the cards that serve models, by `--gpus` and CUDA_VISIBLE_DEVICES. No I/O."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.gpu.nvml import NvmlReading

ALL = "all"
_GPU, _MIG = "GPU-", "MIG-"
MAX_CARDS = 64  # more than a machine has
_ENTRY = re.compile(r"[0-9]{1,4}|(?:GPU|MIG)-[0-9A-Za-z/-]{1,96}", re.ASCII)  # MIG-GPU-6f2c/1/0 before driver 470


class GpusRefused(Exception):
    """The wanted cards cannot be used. The text is one sentence with the fix."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card that serves models, or a MIG instance, of which only the UUID is known.

    uuid: its entry in CUDA_VISIBLE_DEVICES. index: NVML's number; None for a MIG instance. memory_bytes, sm_count: 0 if
    unknown.
    """

    uuid: str
    index: int | None = None
    name: str = ""
    memory_bytes: int = 0
    sm_count: int = 0

    @property
    def label(self) -> str:
        """Its name in logs, metrics and reports: "GPU 0", or a MIG instance's UUID."""
        return self.uuid if self.index is None else f"GPU {self.index}"


def checked_gpus(text: str) -> str:
    """The value of `gpus`, without spaces. Raises ValueError with the allowed values."""
    entries = [entry.strip() for entry in text.split(",")]
    if entries == [ALL]:
        return ALL
    if not all(map(_ENTRY.fullmatch, entries)):
        raise ValueError("it takes all, or numbers and UUIDs of nvidia-smi -L, comma-separated: 0,1 or GPU-6f2c")
    if len(entries) > MAX_CARDS:
        raise ValueError(f"it names {len(entries)} GPUs (limit {MAX_CARDS})")
    if len(set(entries)) < len(entries):
        raise ValueError("it names a GPU twice")
    return ",".join(entries)


def choose_cards(gpus: str, reading: NvmlReading, visible: str | None) -> tuple[Card, ...]:
    """The cards of `gpus` in its order; `all` means those in CUDA_VISIBLE_DEVICES (visible; None: every card).

    Numbers are NVML's, as nvidia-smi shows them, in both. Raises GpusRefused.
    """
    cards = tuple(_card(index, reading) for index in range(len(reading.cards)))
    shown = cards if visible is None else tuple(_shown(visible, cards))
    if gpus == ALL:
        return shown
    if not cards:
        raise GpusRefused(
            f"gpus is {gpus!r} and no NVIDIA GPU is here ({reading.detail or reading.outcome}); leave it out, or see "
            "penstock doctor"
        )
    chosen = tuple(_one(entry, cards) for entry in gpus.split(","))
    for entry, card in zip(gpus.split(","), chosen, strict=True):
        if card.index is not None and card not in shown:
            raise GpusRefused(
                f"gpus has {entry!r}, which CUDA_VISIBLE_DEVICES={visible} hides; add it there, or leave it out here"
            )
    if len(set(chosen)) < len(chosen):
        raise GpusRefused(f"gpus is {gpus!r}, which names a GPU twice: by its number and by its UUID")
    return chosen


def _card(at: int, reading: NvmlReading) -> Card:
    card = reading.cards[at]
    return Card(card.uuid or str(card.index), card.index, card.name, card.memory_bytes, card.sm_count)


def _shown(visible: str, cards: Sequence[Card]) -> Iterator[Card]:
    """Like CUDA, it stops at the first invalid entry. An entry that repeats a card is invalid, too."""
    found: set[Card] = set()
    for entry in map(str.strip, visible.split(",")):
        card = _found(entry, cards) if _ENTRY.fullmatch(entry) else None
        if card is None or card in found:
            return
        found.add(card)
        yield card


def _one(entry: str, cards: Sequence[Card]) -> Card:
    card = _found(entry, cards)
    if card is None:
        known = ", ".join(f"{card.index} ({card.uuid})" for card in cards)
        raise GpusRefused(f"gpus has {entry!r}, and this machine has the GPUs {known}; see nvidia-smi -L")
    return card


def _found(entry: str, cards: Sequence[Card]) -> Card | None:
    """A UUID may be abbreviated while it is unique."""
    if entry.startswith(_MIG):
        return Card(entry)
    if entry.startswith(_GPU):
        matching = [card for card in cards if card.uuid.startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    return next((card for card in cards if entry == str(card.index)), None)
