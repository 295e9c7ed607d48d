"""Places models and cameras on cards. No I/O, no clock.

First each model gets one GPU, so that all are served. Then copies are loaded where memory is left, of the busiest
models first. So the loss of one GPU stops a model only if there was no memory for a copy. Models on the CPU are loaded
once. A camera stays on its GPU while that works and is not full; other cameras get the GPU with the most free decoder
time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.gpu.cards import Card

GIB = 1 << 30
# An H200 decoded 10,986 frames/s of 1280x720 H.264 with 7 NVDEC engines.
PIXELS_PER_DECODER_S = 1.45e9


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """What a model needs on each of its cards. memory_bytes: of all its instances. load: measured seconds of a card's
    time per second, 0 if unknown. cards: positions that its config.pbtxt names; empty for any. is_on_cpu: it needs no
    card. is_stateful: a copy that is removed would lose sequences."""

    name: str
    memory_bytes: int = 0
    load: float = 0.0
    cards: tuple[int, ...] = ()
    is_on_cpu: bool = False
    is_stateful: bool = False


@dataclass(frozen=True, slots=True)
class CameraNeed:
    """pixels_per_s: decoded. card: position where it is decoded now; None for a new camera."""

    source_id: str
    pixels_per_s: float
    card: int | None = None


@dataclass(frozen=True, slots=True)
class CardState:
    """A card for a placement. decoders: its NVDEC engines. lost: why it cannot be used; empty if it can. pixels_per_s:
    decoded for cameras that are not placed."""

    card: Card
    decoders: int = 0
    lost: str = ""
    pixels_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Positions of cards by model, and by camera. A camera without a card is not in `cameras`. reasons: one line each,
    by name."""

    models: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cameras: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


def place(cards: Sequence[CardState], models: Sequence[ModelNeed], cameras: Sequence[CameraNeed] = ()) -> Placement:
    """The placement of all models and cameras on the cards that are not lost."""
    board = _Board(cards)
    for model in sorted(models, key=lambda one: (not one.cards, -one.memory_bytes, one.name)):
        board.place_first(model)
    for model in sorted(models, key=lambda one: (-one.load, one.memory_bytes, one.name)):
        board.place_copies(model)
    alive = {at for at, state in enumerate(cards) if not state.lost}
    for camera in sorted(cameras, key=lambda one: (one.card not in alive, -one.pixels_per_s, one.source_id)):
        board.place_camera(camera)
    return board.placement()


class _Board:
    """The cards while a placement is made."""

    def __init__(self, cards: Sequence[CardState]) -> None:
        self._cards = cards
        self._usable = [at for at, state in enumerate(cards) if not state.lost]
        self._free = [state.card.memory_bytes for state in cards]
        self._load = [0.0 for _ in cards]
        self._pixels = [state.pixels_per_s for state in cards]
        self._models: dict[str, list[int]] = {}
        self._cameras: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    def place_first(self, model: ModelNeed) -> None:
        named = [at for at in model.cards if at in self._usable]
        if model.cards:
            self._models[model.name] = named
            for at in named:
                self._take(model, at)
            where = self._labels(named) or "no GPU that this stack uses"
            self._reasons[model.name] = f"{where}: its config.pbtxt names {', '.join(map(str, model.cards))}"
            return
        if model.is_on_cpu and self._usable:
            self._models[model.name] = self._usable[:1]
            self._reasons[model.name] = f"{self._labels(self._usable[:1])}: it runs on the CPU, so one engine loads it"
            return
        fitting = [at for at in self._usable if self._fits(model, at)] or self._usable
        if not fitting:
            self._models[model.name] = []
            self._reasons[model.name] = "no GPU: all are lost"
            return
        best = min(fitting, key=lambda at: (self._busy(at), -self._free[at], at))
        if not self._fits(model, best):
            self._reasons[model.name] = (
                f"{self._labels([best])}: no GPU has {_gib(model.memory_bytes)} free, so loading may fail"
            )
        self._models[model.name] = [best]
        self._take(model, best)

    def place_copies(self, model: ModelNeed) -> None:
        if model.cards or model.name in self._reasons:
            return
        placed = self._models[model.name]
        full = []
        for at in self._usable:
            if at in placed:
                continue
            if self._fits(model, at):
                placed.append(at)
                self._take(model, at)
            else:
                full.append(f"{self._labels([at])} has {_gib(self._free[at])} free, {_gib(model.memory_bytes)} needed")
        placed.sort()
        why = f"it fits ({_gib(model.memory_bytes)} each)" if model.memory_bytes else "it needs no GPU memory"
        self._reasons[model.name] = f"{self._labels(placed)}: {'; '.join([why, *full])}"

    def place_camera(self, camera: CameraNeed) -> None:
        able = [at for at in self._usable if self._has_decoders(at, camera)]
        if camera.card in able:
            at, why = camera.card, "it stays"
        elif able:
            at, why = min(able, key=lambda one: (self._decoding(one), one)), "its decoders have the most free time"
        else:
            self._reasons[camera.source_id] = "no GPU: the decoders of every GPU are full"
            return
        assert at is not None
        self._cameras[camera.source_id] = at
        self._pixels[at] += camera.pixels_per_s
        self._reasons[camera.source_id] = f"{self._labels([at])}: {why} ({self._decoding(at):.0%} used)"

    def placement(self) -> Placement:
        models = {name: tuple(at) for name, at in self._models.items()}
        return Placement(models, self._cameras, self._reasons)

    def _fits(self, model: ModelNeed, at: int) -> bool:
        """A card of unknown size takes everything."""
        return not self._cards[at].card.memory_bytes or model.memory_bytes <= self._free[at]

    def _take(self, model: ModelNeed, at: int) -> None:
        self._free[at] = max(0, self._free[at] - model.memory_bytes)
        self._load[at] += model.load

    def _busy(self, at: int) -> float:
        """Load in relation to the card's size."""
        return self._load[at] / (self._cards[at].card.sm_count or 1)

    def _has_decoders(self, at: int, camera: CameraNeed) -> bool:
        return self._pixels[at] + camera.pixels_per_s <= self._cards[at].decoders * PIXELS_PER_DECODER_S

    def _decoding(self, at: int) -> float:
        """The used share of its decoders, which are not none."""
        return self._pixels[at] / (max(self._cards[at].decoders, 1) * PIXELS_PER_DECODER_S)

    def _labels(self, at: Sequence[int]) -> str:
        return ", ".join(self._cards[one].card.label for one in at)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
