"""Loads copies of models on further GPUs, by the measured load. No call is lost: a copy gets calls once it is loaded.
A removed copy is unloaded once no worker sends calls to it; Triton finishes the calls that are running."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tritonclient.grpc import service_pb2

from penstock.engines.replica_routing import ReplicaState
from penstock.engines.replicas import Replicas
from penstock.gateway.card_engines import CardEngines
from penstock.gpu.cards import Card
from penstock.gpu.model_copies import ModelCopies, NewCopy
from penstock.gpu.placement import CardState, ModelNeed
from penstock.logs import get_logger
from penstock.protocol.call import GrpcCall
from penstock.protocol.engine import Engine
from penstock.protocol.errors import InferenceError
from penstock.protocol.grpc_messages import parsed

INTERVAL_S = 10.0
ANSWER_S = 5.0
_SHARE = 0.5  # of the newest measurement in the load
_STATISTICS = GrpcCall("/inference.GRPCInferenceService/ModelStatistics", b"")
log = get_logger("gateway")


class ModelLoads:
    """Seconds of computing per second, by model, from Triton's counters. No clock."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, Mapping[str, float]]] = {}
        self._loads: dict[str, float] = {}

    def note(self, now: float, computed_s: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
        """The load. computed_s: of each engine that answered, since its start, by model."""
        rates: dict[str, float] = {}
        for engine, totals in computed_s.items():
            before_at, before = self._before.get(engine, (now, totals))
            self._before[engine] = now, totals
            for model, total in totals.items() if now > before_at else ():
                grown = total - before.get(model, 0.0)
                rates[model] = rates.get(model, 0.0) + (grown if grown >= 0 else total) / (now - before_at)
        known = self._loads.keys() | rates.keys()
        self._loads = {
            model: (1 - _SHARE) * self._loads.get(model, 0.0) + _SHARE * rates.get(model, 0.0) for model in known
        }
        return self._loads


class CardCopies:
    """Run `run()` as one task. placements: each model's cards now, and why, for people."""

    def __init__(
        self,
        cards: CardEngines,
        replicas: Replicas,
        engines: Mapping[str, Engine],
        *,
        needs: Callable[[], Sequence[ModelNeed]],
        spread: Callable[[], Awaitable[None]],
    ) -> None:
        """engines: by label. needs: of all models; blocks. spread: returns when all workers know where models are."""
        self.placements = dict(cards.placements)
        self._cards = cards.engines
        self._labels = [each.label for each in cards.engines]
        self._replicas = replicas
        self._engines = engines
        self._needs = needs
        self._spread = spread
        self._measured = ModelLoads()
        self._absent: frozenset[str] = frozenset()
        self._refused: set[tuple[str, int]] = set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.look(time.monotonic())
            except OSError as error:  # a model's folder is being removed
                log.debug("cannot place models now", reason=str(error))

    async def look(self, now: float) -> None:
        """Makes one change, if one is needed; as many as are needed if a card is lost.

        An engine that is absent twice in a row counts as lost.
        """
        statistics = self._replicas.statistics()
        absent = frozenset(row.name for row in statistics if row.standing in (ReplicaState.DOWN, ReplicaState.LOST))
        lost = (absent & self._absent) | {row.name for row in statistics if row.standing is ReplicaState.LOST}
        self._absent = absent
        if not self._replicas.homes:
            return
        wanted = self._replicas.wanted
        found = [need for need in await asyncio.to_thread(self._needs) if need.name in wanted]
        loads = self._measured.note(now, await self._computed(absent))
        needs = [replace(need, load=0.0 if need.is_on_cpu else loads.get(need.name, 0.0)) for need in found]
        for _ in needs if lost else needs[:1]:
            step = self._next(needs, lost)
            if step is None:
                return
            await self._make(step)

    def _next(self, needs: Sequence[ModelNeed], lost: Collection[str]) -> NewCopy | None:
        cards = [
            CardState(Card(each.label, memory_bytes=each.memory_bytes), lost=each.label if each.label in lost else "")
            for each in self._cards
        ]
        homes = {name: [self._labels.index(one) for one in labels] for name, labels in self._replicas.homes.items()}
        return ModelCopies(cards, needs, homes, self._refused).next_copy()

    async def _make(self, step: NewCopy) -> None:
        label = self._labels[step.card]
        for name in step.removed:
            await self._set_home(name, [one for one in self._homes_of(name) if one != label])
            try:
                await self._engines[label].unload(name)
            except InferenceError as error:
                log.warning("a copy of a model cannot be unloaded", model=name, card=label, reason=str(error))
                return
            self._tell(name, f"{step.model} needs the memory of {label}")
        try:
            await self._engines[label].load(step.model)
        except InferenceError as error:
            self._refused.add((step.model, step.card))
            log.warning("a copy of a model cannot be loaded", model=step.model, card=label, reason=str(error))
            return
        if step.model not in self._replicas.wanted:  # a client unloaded it meanwhile
            with suppress(InferenceError):
                await self._engines[label].unload(step.model)
            return
        await self._set_home(step.model, [*self._homes_of(step.model), label])
        self._tell(step.model, step.reason)

    def _homes_of(self, model_name: str) -> list[str]:
        return list(self._replicas.homes.get(model_name, self._labels))

    async def _set_home(self, model_name: str, labels: Sequence[str]) -> None:
        self._replicas.set_homes({**self._replicas.homes, model_name: tuple(sorted(labels, key=self._labels.index))})
        await self._spread()

    def _tell(self, model_name: str, why: str) -> None:
        self.placements[model_name] = reason = f"{', '.join(self._homes_of(model_name))}: {why}"
        log.info("model is placed", model=model_name, cards=reason)

    async def _computed(self, absent: frozenset[str]) -> dict[str, Mapping[str, float]]:
        """Of the engines that answer: seconds of computing by model, since their start."""
        present = [label for label in self._labels if label not in absent]
        found = await asyncio.gather(*(computed_s(self._engines[label]) for label in present), return_exceptions=True)
        return {label: one for label, one in zip(present, found, strict=True) if not isinstance(one, BaseException)}


async def computed_s(engine: Engine) -> Mapping[str, float]:
    """Seconds that the engine's instances computed since its start, by model: a batch counts once."""
    answer = await engine.send(_STATISTICS, deadline=time.monotonic() + ANSWER_S)
    statistics = parsed(service_pb2.ModelStatisticsResponse, answer.message, "the engine")
    found: dict[str, float] = {}
    for model in statistics.model_stats:
        seconds = sum(batch.compute_infer.ns for batch in model.batch_stats) / 1e9
        found[model.name] = found.get(model.name, 0.0) + seconds
    return found
