"""One of several engines with the same models: its load, liveness and models; and merged metrics."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.engines.call_options import CuttableCalls
from penstock.engines.failures import CircuitBreaker, CircuitState, Silence, SilenceAction, means_card_fault
from penstock.engines.probes import answers_within
from penstock.logs import get_logger
from penstock.protocol.call import GrpcAnswer, HttpAnswer
from penstock.protocol.engine import Engine, GrpcStream, ModelState
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InferenceError, ModelNotReady, reason_line


def merged_pages(pages: Mapping[str, bytes]) -> bytes:
    """Merges Prometheus pages (text format 0.0.4, by replica) and adds the label `replica`."""
    families: dict[str, dict[str, list[str]]] = {}
    for replica, page in pages.items():
        name = ""
        for line in page.decode("utf-8", "replace").splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, name, *_ = line.split(" ", 3)
                families.setdefault(name, {}).setdefault(kind, [line])
            elif line and not line.startswith("#"):
                family = name if name and line.startswith(name) else line.partition("{")[0].partition(" ")[0]
                families.setdefault(family, {}).setdefault("samples", []).append(_labelled(line, replica))
    lines = [
        line for parts in families.values() for kind in ("HELP", "TYPE", "samples") for line in parts.get(kind, ())
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(sample: str, replica: str) -> str:
    label = f'replica="{replica}"'
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


def card_fault(answer: object) -> str:
    """The text of an answer that says that the model's CUDA context is broken; else empty."""
    text = ""
    if isinstance(answer, HttpAnswer) and answer.status in SICK_STATUSES:
        text = answer.body[:MAX_FAULT_BYTES].decode("utf-8", "replace")
    elif isinstance(answer, GrpcAnswer) and answer.code in SICK_CODES:
        text = answer.details[:MAX_FAULT_BYTES]
    return reason_line(text) if means_card_fault(text) else ""


T = TypeVar("T")
log = get_logger("engine")
LIVENESS_TIMEOUT_S = 1.0
MAX_FAULT_BYTES = 4096  # of an error's text that are searched
SICK_STATUSES = (500, 502)
SICK_CODES = (2, 13)  # UNKNOWN, INTERNAL
CUT_S, RESTART_S = 5.0, 30.0
MAX_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class CardReplicas:
    """Rules for replicas that each have a GPU. homes: names of a model's replicas at the start; models not in it are
    loaded into all. restart: restarts a replica that has been silent for long; gets name and reason."""

    homes: Mapping[str, Collection[str]] = field(default_factory=dict)
    restart: Callable[[str, str], None] | None = None


@dataclass(frozen=True, slots=True)
class ReplicaHooks:
    """Functions that a replica calls. wanted: models to load on recovery. back: it recovered. restart: it was silent
    for RESTART_S, with the reason."""

    wanted: Callable[[], Iterable[str]]
    back: Callable[[], None]
    restart: Callable[[str], None] | None = None


class Replica:
    """One replica. name: address or card, for logs. lost: why its card cannot be used; empty if it can. generation: how
    often it came up."""

    def __init__(self, name: str, engine: Engine, *, index: int, hooks: ReplicaHooks) -> None:
        self.name = name
        self.engine = engine
        self.index = index
        self.in_flight = 0
        self.lost = ""
        self.generation = 0
        self.circuit = CircuitBreaker(max_pause_s=MAX_PAUSE_S)
        self.models: frozenset[str] = frozenset()
        self._hooks = hooks
        self._silence = Silence(cut_s=CUT_S, restart_s=RESTART_S if hooks.restart is not None else float("inf"))
        self._running = CuttableCalls()
        self._probing: asyncio.Task[bool] | None = None
        self._liveness_task: asyncio.Task[None] | None = None

    @property
    def is_passable(self) -> bool:
        """Whether calls may go through."""
        return not self.lost and self.circuit.is_passable

    def set_lost(self, reason: str) -> None:
        """Its card is lost, which ends its calls; or is back (empty), after which a probe loads its models."""
        if reason == self.lost:
            return
        self.lost = reason
        self.circuit.probe_unanswered(time.monotonic())
        if reason:
            log.warning("replica is left out", replica=self.name, reason=reason)
            self._running.cut(reason)

    async def call(self, ask: Callable[[Engine], Awaitable[T]]) -> T:
        """The engine's result. Raises its errors, and EngineUnavailable if it becomes silent meanwhile."""
        self.in_flight += 1
        try:
            with self._running:
                try:
                    answer = await ask(self.engine)
                except EngineUnavailable:
                    self._note_failure(is_broken=True)
                    raise
                except DeadlineExceeded:
                    self._note_failure(is_broken=False)
                    raise
        finally:
            self.in_flight -= 1
        self.circuit.answered()
        return answer

    async def held(self, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The chunks; the replica counts as busy until they are read or closed. Read the first, empty one at once."""
        self.in_flight += 1
        try:
            yield b""
            async for chunk in chunks:
                yield chunk
        finally:
            self.in_flight -= 1
            await chunks.aclose()

    async def index_rows(self) -> list[ModelState]:
        """The engine's index; updates the known ready models. Raises as the engine."""
        rows = await self.call(lambda engine: engine.repository_index())
        self.models = frozenset(row.name for row in rows if row.state == "READY")
        return rows

    def probe(self) -> "asyncio.Task[bool] | None":
        """The running probe; None if an open circuit is not due for one, or the card is lost."""
        if self.lost:
            return None
        if self._probing is None:
            if not self.circuit.is_passable and not self.circuit.is_probe_due(time.monotonic()):
                return None
            self.circuit.probing()
            self._probing = asyncio.create_task(self._probe())
            self._probing.add_done_callback(self._probed)
        return self._probing

    def close(self) -> None:
        """Stops probing."""
        for task in (self._probing, self._liveness_task):
            if task is not None:
                task.cancel()

    def _note_failure(self, *, is_broken: bool) -> None:
        now = time.monotonic()
        self.circuit.failed(now, is_broken=is_broken)
        if self.circuit.state is CircuitState.SUSPECT and self._liveness_task is None:
            self._liveness_task = asyncio.create_task(self._check_liveness())

    async def _check_liveness(self) -> None:
        try:
            is_answered = await answers_within(LIVENESS_TIMEOUT_S, self.engine)
        finally:
            self._liveness_task = None
        if is_answered or self.circuit.is_refuted:
            self.circuit.probe_answered(time.monotonic())
        else:
            self._unanswered()

    async def _probe(self) -> bool:
        try:
            is_answered = await self.engine.ready() and await self._is_whole()
        except Exception:  # a bug of ours: else the circuit would stay half open
            log.exception("a probe failed unexpectedly", replica=self.name)
            is_answered = False
        if not is_answered:
            self._unanswered()
            return False
        if not self.circuit.is_passable:
            log.info("replica is back", replica=self.name)
            self._hooks.back()
            self.generation += 1
        self.generation = self.generation or 1
        self._silence.answered()
        self.circuit.probe_answered(time.monotonic())
        return True

    async def _is_whole(self) -> bool:
        """Whether a recovered replica has its models. Loads missing ones, except those that cannot be loaded."""
        if self.circuit.is_passable:
            return True
        try:
            rows = await self.engine.repository_index()
            self.models = frozenset(row.name for row in rows if row.state == "READY")
            for name in sorted(set(self._hooks.wanted()) - self.models):
                await self._load(name)
        except InferenceError as error:
            log.warning("replica answers but is not whole", replica=self.name, reason=str(error))
            return False
        return True

    async def _load(self, model_name: str) -> None:
        try:
            await self.engine.load(model_name)
        except ModelNotReady as error:
            log.error("replica comes back without a model", replica=self.name, model=model_name, reason=str(error))
            return
        self.models |= {model_name}

    def _unanswered(self) -> None:
        now = time.monotonic()
        if self.circuit.is_passable:
            log.warning("replica is down", replica=self.name)
        self.circuit.probe_unanswered(now)
        reason = f"the engine at {self.name} fell silent over this request"
        match self._silence.probe_missed(now):
            case SilenceAction.CUT:
                self._running.cut(reason)
            case SilenceAction.RESTART if self._hooks.restart is not None:
                self._hooks.restart(f"it has not answered for {RESTART_S:g} s")

    def _probed(self, _: "asyncio.Task[bool]") -> None:
        self._probing = None


class CountedStream:
    """A GrpcStream that counts as in flight until it ends or is cancelled."""

    def __init__(self, stream: GrpcStream, replica: Replica) -> None:
        self._stream = stream
        self._replica: Replica | None = replica
        replica.in_flight += 1
        self.send, self.half_close, self.receive = stream.send, stream.half_close, stream.receive

    async def end(self) -> GrpcAnswer:
        try:
            return await self._stream.end()
        finally:
            self._release()

    def cancel(self) -> None:
        self._release()
        self._stream.cancel()

    def _release(self) -> None:
        if self._replica is not None:
            self._replica.in_flight -= 1
            self._replica = None
