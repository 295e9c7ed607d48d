"""One of several engines with the same models: its load, liveness and models; and merged metrics."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from penstock.engines.call_options import CuttableCalls
from penstock.engines.failures import CircuitBreaker, CircuitState, Silence, SilenceAction
from penstock.engines.probes import answers_within
from penstock.logs import get_logger
from penstock.protocol.call import GrpcAnswer
from penstock.protocol.engine import Engine, GrpcStream, ModelState
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InferenceError, ModelNotReady


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


T = TypeVar("T")
log = get_logger("engine")
LIVENESS_TIMEOUT_S = 1.0
CUT_S = 5.0
MAX_PAUSE_S = 1.0


class Replica:
    """One replica. name: address, for logs. wanted: models to load on recovery. back: called on recovery."""

    def __init__(self, name: str, engine: Engine, *, index: int, wanted: set[str], back: Callable[[], None]) -> None:
        self.name = name
        self.engine = engine
        self.index = index
        self.in_flight = 0
        self.circuit = CircuitBreaker(max_pause_s=MAX_PAUSE_S)
        self.models: frozenset[str] = frozenset()
        self._wanted = wanted
        self._back = back
        self._silence = Silence(cut_s=CUT_S, restart_s=float("inf"))
        self._running = CuttableCalls()
        self._probing: asyncio.Task[bool] | None = None
        self._liveness_task: asyncio.Task[None] | None = None

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
        """The running probe; None if an open circuit is not due for one."""
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
            self._back()
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
            for name in sorted(self._wanted - self.models):
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
        if self._silence.probe_missed(now) is SilenceAction.CUT:
            self._running.cut(f"the engine at {self.name} fell silent over this request")

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
