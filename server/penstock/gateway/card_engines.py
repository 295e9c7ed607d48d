"""The engines of a stack with several cards, one for each: a file in the run directory, for the gateway's processes."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

_FILE_NAME = "cards.json"


class CardEngine(msgspec.Struct, frozen=True):
    """A Triton that has one card. label: "GPU 0". folder: its run directory. mps_directory: of its card's MPS daemon;
    empty without MPS. memory_bytes: of the card, 0 if unknown."""

    label: str
    uuid: str
    folder: str
    mps_directory: str = ""
    memory_bytes: int = 0


class CardEngines(msgspec.Struct, frozen=True):
    """engines: none if one engine has every card. homes: labels by model at the start, for models that are not on all
    cards. placements: each model's cards, and why, for people."""

    engines: tuple[CardEngine, ...] = ()
    homes: dict[str, tuple[str, ...]] = {}
    placements: dict[str, str] = {}

    def labels(self, by_uuid: Mapping[str, str]) -> dict[str, str]:
        """The values by label instead of UUID, of these cards."""
        return {each.label: by_uuid[each.uuid] for each in self.engines if each.uuid in by_uuid}


NO_CARDS = CardEngines()


def write_card_engines(run_dir: Path, engines: CardEngines) -> None:
    """Call it before the gateway starts. Raises OSError."""
    (run_dir / _FILE_NAME).write_bytes(msgspec.json.encode(engines))


def read_card_engines(run_dir: Path) -> CardEngines:
    """The engines; none if the stack has one for all cards."""
    with suppress(OSError):
        return msgspec.json.decode((run_dir / _FILE_NAME).read_bytes(), type=CardEngines)
    return NO_CARDS
