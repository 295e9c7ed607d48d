"""Decides from measured decoder utilization whether a GPU takes another source. No I/O, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.gpu.cards import Card
from penstock.gpu.placement import PIXELS_PER_DECODER_S, CameraNeed, CardState, place

# Of an H200's decoder time by NVML: with 0.971 all streams were answered in time; from 0.977 on frames were lost.
DECODER_LIMIT = 0.97
FRESH_S = 5.0  # older readings are not used: NVML does not answer
SETTLE_S = 5.0  # until NVML's mean shows a source that was opened
HEVC_COST = 0.6  # of an H.264 pixel's decoding time on an H200


class Verdict(Enum):
    """WAIT: sources that were opened just now are not in the measurement yet; decide again later."""

    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Admission:
    """at: position of the card, if it is admitted. reason: a sentence."""

    verdict: Verdict
    reason: str
    at: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderReading:
    """utilisation: mean share of time, 0 to 1, in which a card's decoders worked, for all programs. at: monotonic."""

    utilisation: float
    at: float


@dataclass(frozen=True, slots=True)
class CardDecoders:
    """Decoders of a card. engines: their number, 0 if unknown. reading: None if NVML did not answer. sources: of this
    program. pixels_per_s: decoded for these, as `cost_of`. pending_pixels_per_s: of those that the reading does not
    show yet. is_avoided: the card is lost, or could not create a decoder just now."""

    card: Card
    engines: int
    reading: DecoderReading | None = None
    sources: int = 0
    pixels_per_s: float = 0.0
    pending_pixels_per_s: float = 0.0
    is_avoided: bool = False

    @property
    def capacity(self) -> float:
        """Known pixels/s; 0 if unknown."""
        return self.engines * PIXELS_PER_DECODER_S

    def measured(self, now: float) -> float | None:
        """Utilisation, if it is recent."""
        return self.reading.utilisation if self.reading is not None and now - self.reading.at <= FRESH_S else None

    def state(self, now: float, limit: float, *, has_pending: bool) -> CardState:
        """For a placement: what is used is measured, else the sum of the sources' rates."""
        share, used = self.measured(now), self.pixels_per_s
        if share is not None:
            pending = self.pending_pixels_per_s if has_pending else 0.0
            used = share * self.capacity + pending + (1 - limit) * self.capacity
        return CardState(self.card, self.engines, "avoided" if self.is_avoided else "", used)


def cost_of(width: int, height: int, fps: float, codec: str) -> float:
    """Pixels/s of a source, as if it were H.264."""
    return width * height * fps * (HEVC_COST if codec == "hevc" else 1.0)


def admit(cards: Sequence[CardDecoders], need: CameraNeed, now: float, limit: float = DECODER_LIMIT) -> Admission:
    """The card for a source. limit: of measured decoders, as a share of their time. A single GPU whose decoders are
    not measured takes every source, because only the limit of an H200 is known. With several such GPUs, the sources'
    rates decide."""
    if len(cards) == 1 and (cards[0].measured(now) is None or not cards[0].engines):
        return Admission(Verdict.ADMIT, f"{cards[0].card.label}: its decoders are not measured", 0)
    for has_pending in (True, False):
        found = place([one.state(now, limit, has_pending=has_pending) for one in cards], (), [need])
        at = found.cameras.get(need.source_id)
        if at is None:
            continue
        if has_pending:
            return Admission(Verdict.ADMIT, found.reasons[need.source_id], at)
        return Admission(Verdict.WAIT, "the last opened sources are not in the measurement of the decoders yet")
    return Admission(Verdict.REFUSE, _refusal(cards, need, now, limit))


def _refusal(cards: Sequence[CardDecoders], need: CameraNeed, now: float, limit: float) -> str:
    known = "; ".join(_fullness(one, need, now, limit) for one in cards)
    more = "another GPU (--gpus), " if len(cards) == 1 else ""
    return (
        f"the video decoders are full ({known}); use fewer streams, a lower frame rate or size, {more}or decoder: "
        "auto, which decodes the rest on the CPU"
    )


def _fullness(one: CardDecoders, need: CameraNeed, now: float, limit: float) -> str:
    label = one.card.label
    if one.is_avoided:
        return f"{label} is lost, or could not create a decoder just now"
    if not one.engines:
        return f"{label} has no video decoder"
    share, more = one.measured(now), need.pixels_per_s / one.capacity
    what = (
        f"{share:.0%} busy" if share is not None else f"{one.pixels_per_s / one.capacity:.0%} by their streams' rates"
    )
    limit = limit if share is not None else 1.0
    streams = f"with {one.sources} streams of this program"
    return f"{label}: {what} {streams}; this one adds {more:.1%}, the limit is {limit:.0%}"
