"""Which of several cards decodes each source. No I/O, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from penstock.gpu.cards import Card
from penstock.gpu.placement import CameraNeed, CardState, place

CARD_GONE_FOR_S = 60.0  # after this, a newly opened source tries the card again
UNKNOWN_PIXELS_PER_S = 1920 * 1080 * 30.0  # of a source that was never open
FULL = "the decoders of every card are full, or the cards cannot be used"

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class DecoderCard:
    """A card for decode processes. engines: its video decoders. environ: of its processes, which see this card only."""

    card: Card
    engines: int
    environ: Mapping[str, str] = field(default_factory=dict)


class DecoderCards:
    """Places sources on cards. Without several cards, every source is on the only one."""

    def __init__(self, cards: Sequence[DecoderCard] = ()) -> None:
        self._cards = cards if len(cards) > 1 else ()
        self._sources: dict[str, _PlacedSource] = {}

    def choose(self, source_id: str, now: float) -> bool:
        """Chooses the source's card for a new process. False if no card has room for it."""
        if not self._cards:
            return True
        source = self._sources.setdefault(source_id, _PlacedSource())
        source.at = None
        states = [
            CardState(one.card, one.engines, "" if now >= source.avoided.get(at, 0.0) else "avoided", self._used(at))
            for at, one in enumerate(self._cards)
        ]
        found = place(states, (), [CameraNeed(source_id, source.pixels_per_s, source.last)])
        source.at = source.last = found.cameras.get(source_id)
        log.info("source is placed", source=source_id, card=found.reasons[source_id])
        return source.at is not None

    def _used(self, at: int) -> float:
        return sum(source.pixels_per_s for source in self._sources.values() if source.at == at)

    def position(self, source_id: str) -> int | None:
        """The position of the source's card; None without several cards, or if it has none."""
        source = self._sources.get(source_id)
        return source.at if source is not None else None

    def environ(self, source_id: str) -> Mapping[str, str]:
        """Variables of the source's decode process; empty without several cards."""
        at = self.position(source_id)
        return {} if at is None else self._cards[at].environ

    def opened(self, source_id: str, pixels_per_s: float) -> None:
        """Records the rate of a source that was opened."""
        if (source := self._sources.get(source_id)) is not None and pixels_per_s > 0:
            source.pixels_per_s = pixels_per_s

    def avoid(self, source_id: str, now: float) -> bool:
        """Avoids the source's card, which is lost or full, for a while. Returns whether there are other cards."""
        at = self.position(source_id)
        if at is None:
            return False
        source = self._sources[source_id]
        source.avoided[at] = now + CARD_GONE_FOR_S
        log.warning("a source moves away from its card", source=source_id, card=self._cards[at].card.label)
        return any(now >= source.avoided.get(other, 0.0) for other in range(len(self._cards)))

    def leave(self, source_id: str) -> None:
        """Records that the source has no process. Its rate and last card are kept."""
        if (source := self._sources.get(source_id)) is not None:
            source.at = None

    def forget(self, source_id: str) -> None:
        """Removes a source that has ended."""
        self._sources.pop(source_id, None)


@dataclass(slots=True)
class _PlacedSource:
    """at: position of its card while it has a process. last: the one before. avoided: until when, by position."""

    pixels_per_s: float = UNKNOWN_PIXELS_PER_S
    at: int | None = None
    last: int | None = None
    avoided: dict[int, float] = field(default_factory=dict)
