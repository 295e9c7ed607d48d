"""Changes where models are loaded, by their measured load. No I/O, no clock.

A model whose GPUs are all lost is loaded on another one. A model on a busy GPU gets a copy on a less busy one. If
memory is short there, copies of models that other GPUs have too are removed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.gpu.placement import CardState, ModelNeed

BUSY = 0.5  # seconds of a card's time per second, from which a copy is worth its memory
GAIN = 0.2  # of the busiest card's load, by which a copy must lower it: the load of a minute is no forecast
Homes = Mapping[str, Sequence[int]]  # positions of cards by model


@dataclass(frozen=True, slots=True)
class NewCopy:
    """A model to load on one more card, and the models whose copies there are removed before. reason: one line."""

    model: str
    card: int
    removed: tuple[str, ...]
    reason: str


class ModelCopies:
    """A placement, and what of it can be changed.

    homes: a model that is not in it is on all cards. refused: copies (model, card) that could not be loaded.
    """

    def __init__(
        self,
        cards: Sequence[CardState],
        models: Sequence[ModelNeed],
        homes: Homes,
        refused: Collection[tuple[str, int]] = (),
    ) -> None:
        self._cards = cards
        self._models = models
        self._homes = {model.name: tuple(homes.get(model.name, range(len(cards)))) for model in models}
        self._refused = refused
        self._alive = [at for at, state in enumerate(cards) if not state.lost]

    def next_copy(self) -> NewCopy | None:
        """The next change; None if the placement is good enough."""
        return self._rescue() or self._relieve()

    def _rescue(self) -> NewCopy | None:
        """For a model that no usable card has."""
        for model in self._models:
            if model.cards or any(at in self._alive for at in self._homes[model.name]):
                continue
            rooms = self._rooms_for(model)
            if rooms:
                at = min(rooms, key=lambda one: (len(rooms[one]), -self._free_bytes(one), one))
                return NewCopy(model.name, at, rooms[at], "none of its GPUs can be used")
        return None

    def _relieve(self) -> NewCopy | None:
        """For a model of the busiest card: the copy that makes the busiest card least busy."""
        before = card_loads(self._models, self._homes, self._alive)
        busiest = max(before, key=before.__getitem__, default=0)
        if len(before) < 2 or before[busiest] < BUSY:
            return None
        found: list[tuple[float, int, NewCopy]] = []
        for model in self._models:
            if model.cards or model.is_stateful or not model.load or busiest not in self._homes[model.name]:
                continue
            for at, removed in self._rooms_for(model).items():
                after = card_loads(self._models, self._with(model.name, at, removed), self._alive)
                label, other = self._cards[busiest].card.label, self._cards[at].card.label
                why = (
                    f"{label} is busy {before[busiest]:.0%} of the time and {other} {before[at]:.0%}; "
                    f"with the copy {after[busiest]:.0%} and {after[at]:.0%}"
                )
                found.append((max(after.values()), len(removed), NewCopy(model.name, at, removed, why)))
        best = min(found, key=lambda one: (one[0], one[1], one[2].model, one[2].card), default=None)
        return best[2] if best is not None and best[0] <= (1 - GAIN) * before[busiest] else None

    def _rooms_for(self, model: ModelNeed) -> dict[int, tuple[str, ...]]:
        """The usable cards that can have a new copy, and the copies that are removed for it."""
        rooms = {at: self._room_for(model, at) for at in self._alive if at not in self._homes[model.name]}
        return {at: removed for at, removed in rooms.items() if removed is not None}

    def _room_for(self, model: ModelNeed, at: int) -> tuple[str, ...] | None:
        """The copies to remove, the least busy first; None if there is no room."""
        if (model.name, at) in self._refused:
            return None
        missing_bytes, removed = model.memory_bytes - self._free_bytes(at), list[str]()
        for other in sorted(self._on(at), key=lambda one: (one.load, -one.memory_bytes, one.name)):
            if missing_bytes <= 0:
                break
            if other.memory_bytes and self._has_other_home(other, at):
                missing_bytes -= other.memory_bytes
                removed.append(other.name)
        return tuple(removed) if missing_bytes <= 0 else None

    def _has_other_home(self, model: ModelNeed, at: int) -> bool:
        is_free = not (model.cards or model.is_stateful)
        return is_free and any(one != at and one in self._alive for one in self._homes[model.name])

    def _on(self, at: int) -> list[ModelNeed]:
        return [model for model in self._models if at in self._homes[model.name]]

    def _free_bytes(self, at: int) -> float:
        """A card of unknown size takes everything."""
        size_bytes = self._cards[at].card.memory_bytes or float("inf")
        return size_bytes - sum(model.memory_bytes for model in self._on(at))

    def _with(self, name: str, at: int, removed: Collection[str]) -> Homes:
        fewer = {other: tuple(one for one in self._homes[other] if one != at) for other in removed}
        return {**self._homes, **fewer, name: (*self._homes[name], at)}


def card_loads(models: Sequence[ModelNeed], homes: Homes, alive: Sequence[int]) -> dict[int, float]:
    """Load by GPU. Calls go to the least busy GPU that has the model, so all that have it become equally busy."""
    loads = dict.fromkeys(alive, 0.0)
    for model in sorted(models, key=lambda one: (len(homes[one.name]), one.name)):
        able = sorted((at for at in homes[model.name] if at in loads), key=loads.__getitem__)
        left = model.load
        for count, at in enumerate(able, 1):
            is_last = count == len(able)
            step = left if is_last else min(left, (loads[able[count]] - loads[at]) * count)
            for each in able[:count]:
                loads[each] += step / count
            left -= step
    return loads
