"""Reads from Triton's log where our onnxruntime backend runs each model."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.engines.ort_serving.placement import EngineFacts, read_facts
from penstock.engines.triton.log_parser import Emit

MAX_MODELS = 1000
_INSTANCE = re.compile(r"onnxruntime backend ready instance=(\S+) model=(\S+)")

FactsByModel = dict[str, tuple[EngineFacts, ...]]


class ModelFacts:
    """An Emit that also remembers the facts of each model's instances. changed: called after a change."""

    def __init__(self, emit: Emit, changed: Callable[[], None]) -> None:
        self._emit, self._changed = emit, changed
        self._instances: dict[str, dict[str, EngineFacts]] = {}

    def __call__(self, level: int, event: str, /, **fields: str | int) -> None:
        self._emit(level, event, **fields)
        found, facts = _INSTANCE.search(event), read_facts(event)
        if found is None or facts is None:
            return
        instance, model = found.groups()
        if model in self._instances or len(self._instances) < MAX_MODELS:
            instances = self._instances.setdefault(model, {})
            if instances.get(instance) != facts:
                instances[instance] = facts
                self._changed()

    def by_model(self, card_index: int | None = None) -> FactsByModel:
        """The different facts of each model. card_index: NVML's number of the only card that Triton sees."""
        return {model: _distinct(instances, card_index) for model, instances in self._instances.items()}


def _distinct(instances: Mapping[str, EngineFacts], card_index: int | None) -> tuple[EngineFacts, ...]:
    found = [
        facts if card_index is None or facts.device_id is None else replace(facts, device_id=card_index)
        for facts in instances.values()
    ]
    return tuple(dict.fromkeys(found))


def merged_facts(of_engines: Sequence[FactsByModel]) -> FactsByModel:
    """The facts of all engines."""
    models = dict.fromkeys(model for one in of_engines for model in one)
    return {
        model: tuple(dict.fromkeys(facts for one in of_engines for facts in one.get(model, ()))) for model in models
    }
