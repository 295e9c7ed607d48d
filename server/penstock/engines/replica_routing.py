"""Routing over several engines with the same models: which replica gets a call, and which gets it again.

Calls go to the least busy replica. An unanswered call that may be repeated is sent to another one. A sequence stays on
one replica while that serves.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from typing import TypeVar

from penstock.engines.call_options import RetryBudget
from penstock.engines.failures import Outliers, means_card_fault
from penstock.engines.relayed_calls import may_repeat, model_of, sequence_of
from penstock.engines.replica import SICK_CODES, SICK_STATUSES, CardReplicas, Replica, ReplicaHooks, card_fault
from penstock.logs import get_logger
from penstock.protocol.call import A, Answer, Call, HttpAnswer
from penstock.protocol.engine import Engine
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, EngineUnavailable, InferenceError, ModelNotFound

T = TypeVar("T")
log = get_logger("engine")
Ask = Callable[[Engine], Awaitable[T]]
_BUSY_STATUSES = (503,)
_BUSY_CODES = (8, 14)  # RESOURCE_EXHAUSTED, UNAVAILABLE
# Triton's text for a model that is being unloaded; while Triton exits, for all models.
_NO_VERSIONS = "has no available versions"


class ReplicaState(StrEnum):
    """Whether a replica gets calls. EJECTED: it fails more than the others. DOWN: no answer. LOST: its card is lost."""

    UP = "up"
    EJECTED = "ejected"
    DOWN = "down"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """State of one replica. ejections: since the start."""

    name: str
    standing: ReplicaState
    in_flight: int
    ejections: int


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """A call for routing. model, sequence: empty if irrelevant."""

    may_repeat: Callable[[], bool]  # evaluated only if a replica did not answer
    model: str = ""
    sequence: str = ""
    named: Callable[[], str] = str  # the model; evaluated only if a replica has lost it


class ReplicaRouter:
    """Chooses replicas, and calls them. Create it inside the running loop."""

    def __init__(
        self,
        engines: Mapping[str, Engine],  # by address, at least one
        *,
        budget: RetryBudget | None = None,  # shared with the engines
        outliers: Outliers | None = None,
        uniform: Callable[[], float] = random.random,  # in [0, 1)
        cards: CardReplicas | None = None,
    ) -> None:
        self._wanted: set[str] = set()
        cards = cards or CardReplicas()
        self._restart = cards.restart
        self._homes_by_model: Mapping[str, Collection[str]] = cards.homes
        self._counted_homes: dict[str, int] = {}
        self._replicas = [
            Replica(name, engine, index=index, hooks=self._hooks(index, name))
            for index, (name, engine) in enumerate(engines.items())
        ]
        self._budget = budget or RetryBudget()
        self._outliers = outliers or Outliers(len(self._replicas))
        self._sequential: set[str] = set()
        self._uniform = uniform

    def statistics(self) -> list[ReplicaStatistics]:
        """All replicas, in the given order."""
        now = time.monotonic()
        return [
            ReplicaStatistics(
                replica.name,
                self._replica_state(replica, now),
                replica.in_flight,
                self._outliers.ejections(replica.index),
            )
            for replica in self._replicas
        ]

    def set_lost(self, reasons: Mapping[str, str]) -> None:
        """Sets which replicas have lost their GPUs: the reason by name. Ends the calls of those that were not lost
        before."""
        for replica in self._replicas:
            replica.set_lost(reasons.get(replica.name, ""))

    def left_out(self) -> Mapping[str, str]:
        """Replicas that get no calls until they are back, by name, and why."""
        return {
            replica.name: replica.lost or f"the engine of {replica.name} does not answer; it is started again"
            for replica in self._replicas
            if not replica.is_passable
        }

    def generation(self, name: str) -> int:
        """How often this replica came up; 0 before it first answered."""
        return next(replica.generation for replica in self._replicas if replica.name == name)

    @property
    def homes(self) -> Mapping[str, Collection[str]]:
        """Names of replicas by model; models that are not in it are in all replicas."""
        return self._homes_by_model

    def set_homes(self, homes: Mapping[str, Collection[str]]) -> None:
        """Calls go there from now on. The caller loads the models before, and unloads them elsewhere afterwards."""
        self._homes_by_model = homes

    @property
    def wanted(self) -> frozenset[str]:
        """Models that are loaded, or will be when a replica that has them is back."""
        return frozenset(self._wanted)

    def live_share(self, model_name: str) -> float:
        """How many of the model's replicas get calls, of those whose instances `model_config` counted."""
        homes = self._homes(model_name)
        counted = self._counted_homes.get(model_name, len(homes))
        return sum(replica.is_passable for replica in homes) / counted if counted else 0.0

    def _hooks(self, index: int, name: str) -> ReplicaHooks:
        restart = self._restart
        return ReplicaHooks(
            wanted=lambda: [model for model in self._wanted if name in self._homes_by_model.get(model, (name,))],
            back=partial(self._back, index),
            restart=partial(restart, name) if restart is not None else None,
        )

    # Selection

    async def _ask(self, ask: Ask[T], question: RoutedCall, verdict: Callable[[T], bool | None] = lambda _: None) -> T:
        """One replica's answer, or another's if it gave none or unloaded the model. verdict: as verdict_of."""
        first = self._pick(question)
        try:
            answer = await self._attempt(first, ask, verdict)
        except (EngineUnavailable, ModelNotFound) as error:
            if isinstance(error, ModelNotFound) and not self._has_lost(str(error), first, question):
                raise
            second = self._other(first, question)
            if second is None:
                raise
        else:
            second = self._other(first, question) if self._has_lost(_not_found_text(answer), first, question) else None
            if second is None:
                return answer
        return await self._attempt(second, ask, verdict)

    async def _attempt(self, replica: Replica, ask: Ask[T], verdict: Callable[[T], bool | None]) -> T:
        """Its answer. A broken CUDA context, which only a new process ends, counts as no answer."""
        try:
            answer = await replica.call(ask)
        except (EngineUnavailable, DeadlineExceeded, EngineFailed) as error:
            self._failed(replica)
            if isinstance(error, EngineFailed) and means_card_fault(error.message):
                raise EngineUnavailable(f"the engine at {replica.name} cannot use its GPU: {error}") from error
            raise
        is_well = verdict(answer)
        if is_well:
            self._outliers.succeeded(replica.index, time.monotonic())
        elif is_well is False:
            self._failed(replica)
            if fault := card_fault(answer):
                raise EngineUnavailable(f"the engine at {replica.name} cannot use its GPU: {fault}")
        return answer

    def _back(self, index: int) -> None:
        self._outliers.try_again(index, time.monotonic())

    def _failed(self, replica: Replica) -> None:
        if self._outliers.failed(replica.index, time.monotonic()):
            log.warning("replica is left out for a while: it fails more than the others", replica=replica.name)

    def _has_lost(self, words: str, replica: Replica, question: RoutedCall) -> bool:
        """Whether the replica unloaded the model while another has it. It then gets no calls for it for a while."""
        if _NO_VERSIONS not in words:
            return False
        model = question.named()
        replica.models -= {model}
        return any(model in other.models for other in self._passable() if other is not replica)

    def _other(self, first: Replica, question: RoutedCall) -> Replica | None:
        if not question.may_repeat() or not any(replica is not first for replica in self._passable()):
            return None
        return self._pick(question, besides=first) if self._budget.take_elsewhere(time.monotonic()) else None

    def _pick(self, question: RoutedCall, besides: Replica | None = None) -> Replica:
        """The least busy healthy replica, or any of equals. Raises EngineUnavailable if none answers."""
        able: list[Replica] = []
        homes = self._homes(question.model) if self._homes_by_model else self._replicas
        for replica in homes:
            if not replica.is_passable:
                replica.probe()  # calls may be the only trigger in this process
            elif replica is not besides:
                able.append(replica)
        if not able:
            names = ", ".join(f"{replica.name}: {replica.lost}" if replica.lost else replica.name for replica in homes)
            raise EngineUnavailable(f"none of the engines answers ({names})")
        if question.model:
            able = [replica for replica in able if question.model in replica.models] or able
        if not self._outliers.is_calm:
            now = time.monotonic()
            able = [replica for replica in able if self._is_in_service(replica, now)] or able
        if question.sequence:
            return max(able, key=lambda replica: _affinity(question, replica))
        start = int(self._uniform() * len(able))
        return min(able[start:] + able[:start], key=_load_of)

    def _is_in_service(self, replica: Replica, now: float) -> bool:
        if self._outliers.is_ejected(replica.index, now):
            return False
        return not (self._outliers.is_on_trial(replica.index) and replica.in_flight)

    def _passable(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.is_passable]

    def _homes(self, model_name: str) -> list[Replica]:
        """The replicas that have the model, or load it when they are back."""
        names = self._homes_by_model.get(model_name)
        return self._replicas if names is None else [replica for replica in self._replicas if replica.name in names]

    def _why_homeless(self, model_name: str) -> str:
        """Why no replica can have the model now, though some serve; else empty."""
        if model_name not in self._homes_by_model or not self._passable():
            return ""
        homes = self._homes(model_name)
        if any(replica.is_passable for replica in homes):
            return ""
        return "; ".join(replica.lost or f"{replica.name} does not answer" for replica in homes) or "no GPU has it"

    def _replica_state(self, replica: Replica, now: float) -> ReplicaState:
        if replica.lost:
            return ReplicaState.LOST
        if not replica.circuit.is_passable:
            return ReplicaState.DOWN
        return ReplicaState.EJECTED if self._outliers.is_ejected(replica.index, now) else ReplicaState.UP

    def _names_matter(self) -> bool:
        """Whether a call's model matters: not while all replicas have the same ones."""
        first = self._replicas[0].models
        return bool(self._sequential or self._homes_by_model) or any(
            replica.models != first for replica in self._replicas
        )

    def _question(self, call: Call[A]) -> RoutedCall:
        model = model_of(call) if self._names_matter() else ""
        sequence = sequence_of(call) if model in self._sequential else ""
        return RoutedCall(partial(may_repeat, call), model, sequence, partial(model_of, call))

    # Broadcast

    async def _call_all(self, ask: Ask[T], replicas: Iterable[Replica]) -> list[T]:
        """The answers of those that are passable. Raises the first error."""
        passable = [replica for replica in replicas if replica.is_passable]
        outcomes = await asyncio.gather(*(replica.call(ask) for replica in passable), return_exceptions=True)
        return _answers(outcomes)

    async def _each(self, replicas: Iterable[Replica], ask: Callable[[Replica], Awaitable[T]]) -> list[T]:
        """The answers of those that succeed. Raises the first error if none does."""
        outcomes = await asyncio.gather(*(ask(replica) for replica in replicas), return_exceptions=True)
        answered = [outcome for outcome in outcomes if not isinstance(outcome, InferenceError)]
        return _answers(answered or outcomes)


def _answers(outcomes: list[T | BaseException]) -> list[T]:
    answers: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        answers.append(outcome)
    if not answers:
        raise EngineUnavailable("none of the engines answers")
    return answers


def _not_found_text(answer: object) -> str:
    return answer.not_found_text if isinstance(answer, Answer) else ""


def verdict_of(answer: Answer) -> bool | None:
    """True or False for the replica's health; None if it is busy."""
    busy, sick = (_BUSY_STATUSES, SICK_STATUSES) if isinstance(answer, HttpAnswer) else (_BUSY_CODES, SICK_CODES)
    return None if answer.status_code in busy else answer.status_code not in sick


def _affinity(question: RoutedCall, replica: Replica) -> bytes:
    """Rendezvous hashing: a sequence moves only when its replica goes down."""
    return blake2b(f"{question.model}\0{question.sequence}\0{replica.name}".encode(), digest_size=8).digest()


_load_of = attrgetter("in_flight")


def always() -> bool:
    """For a call that may be repeated."""
    return True


def never() -> bool:
    """For a call that may not be repeated."""
    return False
