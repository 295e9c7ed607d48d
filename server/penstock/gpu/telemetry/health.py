"""Decides from telemetry messages which GPUs are lost. No I/O, no clock."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.gpu.telemetry.messages import CardLoad, TelemetryMessage

# NVIDIA's Xid catalog requires a reset or restart: stopped, halted, memory that cannot be remapped, off the bus,
# uncontained memory error, unresponsive GSP, unrecovered memory error.
NEEDS_RESET = frozenset({46, 62, 64, 79, 95, 119, 120, 140})
GONE = "the driver does not show it any more"
_FIX = "see dmesg, then reset the GPU (nvidia-smi --gpu-reset) or restart the machine"


@dataclass(frozen=True, slots=True)
class GpuFault:
    """was_silent: NVML could not read the card; this fault ends when NVML can. A fault by Xid lasts until a reset."""

    reason: str
    was_silent: bool


class CardHealth:
    """Health of all known cards. Lost: it fails, is gone, or an Xid requires a reset."""

    def __init__(self, visible: str | None = None) -> None:
        """visible: CUDA_VISIBLE_DEVICES, None if unset. Only its cards count for `reason`."""
        self._visible = visible
        self._known: dict[str, int] = {}
        self._faults: dict[str, GpuFault] = {}
        self._xids: Counter[tuple[int, int]] = Counter()

    def observe(self, line: TelemetryMessage) -> None:
        """Updates from the newest message."""
        if line.has_nvml:
            present = {self._key(card) for card in line.cards}
            for card in line.cards:
                self._observe_card(card)
            silent = dict.fromkeys(self._known.keys() - present, GONE)
        else:
            silent = dict.fromkeys(self._known, line.why or "NVML does not answer any more")
        self._faults |= {key: GpuFault(reason, True) for key, reason in silent.items()}
        for xid in line.xids:
            self._xids[xid.gpu, xid.number] += 1
            if xid.number in NEEDS_RESET:
                key = next((uuid for uuid, index in self._known.items() if index == xid.gpu), str(xid.gpu))
                self._faults.setdefault(key, GpuFault(f"Xid {xid.number}", False))

    def _observe_card(self, card: CardLoad) -> None:
        key = self._key(card)
        self._known[key] = card.index
        trouble = self._faults.get(key)
        if card.lost:
            self._faults[key] = GpuFault(card.lost, True)
        elif trouble is not None and trouble.was_silent:
            del self._faults[key]

    def _key(self, card: CardLoad) -> str:
        """Its UUID, or the UUID last seen at its index."""
        if card.uuid:
            return card.uuid
        return next((uuid for uuid, index in self._known.items() if index == card.index), str(card.index))

    @property
    def cards(self) -> Mapping[int, str]:
        """All known cards by index: the reason why it is lost, or empty."""
        return {
            index: trouble.reason if (trouble := self._faults.get(key)) is not None else ""
            for key, index in self._known.items()
        }

    @property
    def xids(self) -> Mapping[tuple[int, int], int]:
        """Count by (card, Xid)."""
        return dict(self._xids)

    @property
    def lost(self) -> Mapping[str, str]:
        """Lost cards that are visible to CUDA, by UUID: one sentence with the fix."""
        return {
            key: f"GPU {index} ({key}) is lost: {trouble.reason}; {_FIX}"
            for key, trouble in self._faults.items()
            if (index := self._known.get(key)) is not None and is_visible(index, key, self._visible)
        }

    @property
    def uuids(self) -> Mapping[str, int]:
        """All known cards: index by UUID."""
        return dict(self._known)

    @property
    def reason(self) -> str:
        """Why models cannot be served on the GPU; empty if all cards visible to CUDA are healthy."""
        return next(iter(self.lost.values()), "")


def is_visible(index: int, uuid: str, visible: str | None) -> bool:
    """Whether CUDA may use the card, by CUDA_VISIBLE_DEVICES: NVML indexes or UUID prefixes, up to an invalid one."""
    if visible is None:
        return True
    for entry in map(str.strip, visible.split(",")):
        if entry.startswith("MIG-"):
            return True  # a MIG instance's name does not identify its card
        if not entry.isdecimal() and not entry.startswith("GPU-"):
            return False
        if entry == str(index) or (entry.startswith("GPU-") and uuid.startswith(entry)):
            return True
    return False
