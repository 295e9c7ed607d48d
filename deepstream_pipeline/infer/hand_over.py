"""Where rows wait for the engine that a card made: what is wished, and what was found to work."""

from dataclasses import dataclass
from enum import StrEnum


class HandOver(StrEnum):
    """device: in the card's memory, which the engine reads by itself. host: in this machine's, as all others.

    auto: device where a trial finds that the engine takes them so, else host.
    """

    AUTO = "auto"
    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class HandOverChoice:
    """kind: DEVICE or HOST. reason: why not on the card, one sentence; empty for DEVICE."""

    kind: HandOver
    reason: str = ""

    @property
    def is_on_card(self) -> bool:
        return self.kind is HandOver.DEVICE
