"""Which card decodes each source. No I/O, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from penstock.gpu.cards import Card
from penstock.gpu.placement import CameraNeed
from penstock_video.sources.admission import (
    DECODER_LIMIT,
    SETTLE_S,
    Admission,
    CardDecoders,
    DecoderReading,
    Verdict,
    admit,
)

CARD_GONE_FOR_S = 60.0  # after this, a newly opened source tries the card again
UNKNOWN_PIXELS_PER_S = 1920 * 1080 * 30.0  # of a source that was never open, if none is
_NEVER = float("inf")

log = structlog.get_logger(component="video")


@dataclass(frozen=True, slots=True)
class DecoderCard:
    """A card for decode processes. engines: its video decoders, 0 if unknown. environ: of its processes, which see this
    card only; empty for the only card."""

    card: Card
    engines: int
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CardSnapshot:
    """A card's decoders for metrics. utilisation: by NVML, None if it does not answer."""

    label: str
    utilisation: float | None
    sources: int


class DecoderCards:
    """Admits sources to cards, and places them if there are several. Not thread-safe, except `snapshots`."""

    def __init__(self, cards: Sequence[DecoderCard] = (), limit: float = DECODER_LIMIT) -> None:
        """limit: share of a card's decoder time from which on it refuses sources; 1 to use no measurement."""
        self._limit = limit
        self._cards = cards
        self._sources: dict[str, _PlacedSource] = {}
        self._readings: Sequence[DecoderReading | None] = [None] * len(cards)
        self.refusals = 0  # of sources, by full cards

    def measured(self, readings: Sequence[DecoderReading | None]) -> None:
        """Records the newest reading of each card; none for a card that NVML cannot read."""
        self._readings = readings if len(readings) == len(self._cards) else [None] * len(self._cards)

    def choose(self, source_id: str, now: float) -> Admission:
        """Chooses the source's card for a new process."""
        if not self._cards:
            return Admission(Verdict.ADMIT, "the decoders are not measured", 0)
        source = self._sources.setdefault(source_id, _PlacedSource())
        source.at = None
        known = [one.pixels_per_s for one in self._sources.values() if one.pixels_per_s]
        typical = sum(known) / len(known) if known else UNKNOWN_PIXELS_PER_S
        boards = [self._decoders(at, now, typical, source.avoided.get(at, 0.0)) for at in range(len(self._cards))]
        found = admit(boards, CameraNeed(source_id, source.pixels_per_s or typical, source.last), now, self._limit)
        if found.verdict is Verdict.ADMIT:
            source.at = source.last = found.at
            source.shown_at = _NEVER
        self.refusals += found.verdict is Verdict.REFUSE
        if len(self._cards) > 1 or found.verdict is Verdict.REFUSE:
            log.info("source is placed", source=source_id, card=found.reason)
        return found

    def position(self, source_id: str) -> int | None:
        """The position of the source's card; None without several cards, or if it has none."""
        source = self._sources.get(source_id)
        return source.at if source is not None and len(self._cards) > 1 else None

    def environ(self, source_id: str) -> Mapping[str, str]:
        """Variables of the source's decode process; empty without several cards."""
        at = self.position(source_id)
        return {} if at is None else self._cards[at].environ

    def opened(self, source_id: str, pixels_per_s: float, now: float) -> None:
        """Records the rate of a source that was opened, see `admission.cost_of`."""
        if (source := self._sources.get(source_id)) is None:
            return
        if pixels_per_s > 0:
            source.pixels_per_s = pixels_per_s
        source.shown_at = min(source.shown_at, now + SETTLE_S)

    def avoid(self, source_id: str, now: float) -> bool:
        """Avoids the source's card, which is lost or full, for a while. Returns whether there are other cards."""
        at = self.position(source_id)
        if at is None:
            return False
        source = self._sources[source_id]
        source.avoided[at] = now + CARD_GONE_FOR_S
        log.warning("a source moves away from its GPU", source=source_id, card=self._cards[at].card.label)
        return any(now >= source.avoided.get(other, 0.0) for other in range(len(self._cards)))

    def leave(self, source_id: str) -> None:
        """Records that the source has no process. Its rate and last card are kept."""
        if (source := self._sources.get(source_id)) is not None:
            source.at = None

    def forget(self, source_id: str) -> None:
        """Removes a source that has ended."""
        self._sources.pop(source_id, None)

    def snapshots(self) -> tuple[CardSnapshot, ...]:
        """Each card. Thread-safe."""
        placed = [source.at for source in list(self._sources.values())]
        return tuple(
            CardSnapshot(one.card.label, reading.utilisation if reading is not None else None, placed.count(at))
            for at, (one, reading) in enumerate(zip(self._cards, self._readings, strict=True))
        )

    def _decoders(self, at: int, now: float, typical: float, avoided_until: float) -> CardDecoders:
        """typical: pixels/s of a source that was never open."""
        placed = [source for source in self._sources.values() if source.at == at]
        return CardDecoders(
            self._cards[at].card,
            self._cards[at].engines,
            self._readings[at] if self._limit < 1 else None,
            len(placed),
            sum(source.pixels_per_s or typical for source in placed),
            sum(source.pixels_per_s or typical for source in placed if now < source.shown_at),
            is_avoided=now < avoided_until,
        )


@dataclass(slots=True)
class _PlacedSource:
    """pixels_per_s: 0 until it was open. at: position of its card while it has a process. last: the one before.
    shown_at: when a reading shows it. avoided: until when, by position."""

    pixels_per_s: float = 0.0
    at: int | None = None
    last: int | None = None
    shown_at: float = _NEVER
    avoided: dict[int, float] = field(default_factory=dict)
