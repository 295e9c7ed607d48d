"""Client of the core's batcher, for worker processes and other programs of this host."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.engines.model_health import KnownModel
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.workers.connection import (
    SOCKET_NAME,
    CallFailed,
    CallLate,
    CallsCut,
    CancelInfer,
    CancelledAt,
    ClientHello,
    ClientRejected,
    CoreState,
    EngineSuspected,
    FindModel,
    Infer,
    Inferred,
    MessageConnection,
    ModelFound,
    ModelsServed,
    PendingCancellations,
    QueuesReported,
    RequestFailed,
    SlabPartGranted,
    Sync,
    SyncDone,
    ToClient,
    WorkerHello,
    error_from,
)
from penstock.gateway.workers.core_relay import CORE_GONE
from penstock.gateway.workers.slab_sharing import ClientSlab, move_to_slab
from penstock.logs import get_logger
from penstock.protocol.cancellation import CancelStage, note_cancel_stage
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, Overloaded
from penstock.protocol.inference import InferRequest, InferResponse
from penstock.protocol.shared_memory import Lease

CORE_SILENT = "the gateway's core does not answer; retry in a second"
SILENCE_S = 5.0
FIND_TIMEOUT_S = 5.0
LATE_S = 0.25  # time after a deadline, which the core enforces, until the client gives up
_SWEEP_S = 0.1
_RECONNECT_S = 0.05
_RETRY_REJECTED_S = 1.0  # until a rejected client process connects again
_NO_MODELS: Mapping[str, KnownModel] = MappingProxyType({})

log = get_logger("core_client")


class CoreClient:
    """EngineView and Batcher over the core. Run `run()` as one task; call the rest from the same event loop.

    greeting: identifies this peer. max_asks: inferences waiting for the core. slab: for large tensors.
    """

    def __init__(
        self, run_dir: Path, greeting: WorkerHello | ClientHello, *, max_asks: int, slab: ClientSlab | None = None
    ) -> None:
        self._path = str(run_dir / SOCKET_NAME)
        self._greeting = greeting
        self._is_front = isinstance(greeting, WorkerHello)  # a client process reports errors itself
        self._log = (
            log.bind(worker=greeting.index) if isinstance(greeting, WorkerHello) else log.bind(program=greeting.name)
        )
        self._rejection = ""
        self._max_asks = max_asks
        self._slab = slab
        self._decoder: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
        self._line: MessageConnection[ToClient] | None = None
        self._is_up = False
        self._reason = "the gateway's core has not answered yet"
        self._generation = 0
        self._models: Mapping[str, KnownModel] = _NO_MODELS
        self._left_out: Mapping[str, str] = {}
        self._take_state: Callable[[CoreState], None] = lambda _: None
        self._owned: frozenset[str] = frozenset()
        self.apart: frozenset[str] = frozenset()  # models with an engine process of their own
        self._cut: Callable[[str], None] = lambda _: None
        self._numbers = itertools.count(1)
        self._asks: dict[int, tuple[asyncio.Future[InferResponse], float]] = {}
        self._finds: dict[int, asyncio.Future[ModelConfig]] = {}
        self._departures = PendingCancellations()
        self._served: set[str] = set()
        self._reported: Mapping[str, QueueStatistics] = {}
        self._last_received_at = 0.0
        self._gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.first_state = asyncio.Event()  # set when the core has sent the engine's state
        self.first_up = asyncio.Event()

    # EngineView

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def reason(self) -> str:
        """Why the engine is not up; empty while it is."""
        return self._reason

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def models(self) -> Mapping[str, KnownModel]:
        return self._models

    @property
    def left_out(self) -> Mapping[str, str]:
        return self._left_out

    def when_state(self, take: Callable[[CoreState], None]) -> None:
        """take: called with each message about the engine's state."""
        self._take_state = take

    def when_silent(self, cut: Callable[[str], None]) -> None:
        """cut: called with the reason if calls in the engine will not be answered any more."""
        self._cut = cut

    def suspect(self) -> None:
        """Reports to the core that a call could not reach the engine."""
        self._send(EngineSuspected())

    def note_late(self, model_name: str, waited_s: float, *, is_waiting: bool = False) -> None:
        """Reports to the core that a call ended without a response, or waits long."""
        self._send(CallLate(model_name, waited_s, is_waiting))

    def note_failed(self, model_name: str) -> None:
        """Reports to the core that a client's inference failed in the engine."""
        self._send(CallFailed(model_name))

    def note_served(self, model_name: str) -> None:
        """Reports to the core that the model served a request, with the next sweep."""
        self._served.add(model_name)

    def report_queues(self, queues: Mapping[str, QueueStatistics]) -> None:
        """Reports this worker's own queues to the core, if they have changed."""
        if queues != self._reported and self._line is not None and self._line.is_open:
            self._reported = queues
            self._line.send(QueuesReported(dict(queues)))

    async def note_loaded(self, model_name: str) -> None:
        """Does nothing: the core loads models itself."""

    def note_unloaded(self, model_name: str) -> None:
        """Does nothing: the core unloads models itself."""

    async def find(self, model_name: str) -> ModelConfig:
        """The config of a ready model, fetched from the core if unknown. Raises the core's error."""
        known = self._models.get(model_name)
        if known is not None and known.is_ready and known.config is not None:
            return known.config
        number = next(self._numbers)
        future: asyncio.Future[ModelConfig] = self._loop.create_future()
        self._finds[number] = future
        try:
            self._require_line().send(FindModel(number, model_name))
            async with asyncio.timeout(FIND_TIMEOUT_S):
                return await future
        except TimeoutError as error:
            raise EngineUnavailable(CORE_SILENT) from error
        finally:
            self._finds.pop(number, None)

    # Batching

    def owns(self, model_name: str) -> bool:
        """Whether the core forms this model's batches."""
        return model_name in self._owned

    def refuse_hopeless(self, model_name: str, *, rows: int, deadline: float | None) -> None:
        """Does nothing: the core knows the queue, and rejects the request on arrival."""

    async def infer(self, request: InferRequest, *, client: str, priority: int = 0) -> InferResponse:
        """See Batcher.infer."""
        line = self._require_line()
        if len(self._asks) >= self._max_asks:
            raise Overloaded(f"{len(self._asks)} requests wait for the gateway's core; retry after 0.2 s")
        number = next(self._numbers)
        future: asyncio.Future[InferResponse] = self._loop.create_future()
        until = float("inf") if request.deadline is None else request.deadline + LATE_S
        self._asks[number] = future, until
        leases: list[Lease] = []
        is_answered = False
        try:
            asked, leases = (request, leases) if self._slab is None else move_to_slab(request, self._slab)
            try:
                line.send(Infer(number, asked, client, priority))
            except (OverflowError, ValueError) as error:
                raise InvalidRequest(f"the request cannot be handed to the gateway's core: {error}") from error
            response = await future
            is_answered = True
        except asyncio.CancelledError as cancelled:
            self._leave(number, request.model_name, future, cancelled)
            raise
        finally:
            self._asks.pop(number, None)
            for lease in leases:
                if is_answered:
                    lease.release()
                else:
                    lease.release_later()
        return response

    def _leave(
        self, number: int, model_name: str, future: "asyncio.Future[InferResponse]", cancelled: asyncio.CancelledError
    ) -> None:
        """Ends the cancelled call at once; the stage of the cancellation is resolved later."""
        otherwise = CancelStage.BATCH if self.owns(model_name) else CancelStage.ENGINE
        if future.cancelled() and self._line is not None and self._line.is_open:
            note_cancel_stage(cancelled, self._departures.wait(number, otherwise, time.monotonic()))
            self._line.send(CancelInfer(number))
            return
        if not future.cancelled():  # it was answered at the same moment
            future.exception()
        note_cancel_stage(cancelled, otherwise)

    # the line

    async def run(self) -> None:
        """Connects and reconnects until cancelled."""
        try:
            while True:
                await self._connect()
                await self._until_gone()
                self._lose(self._rejection or CORE_GONE)
                await asyncio.sleep(_RETRY_REJECTED_S if self._rejection else _RECONNECT_S)
                self._rejection = ""
        finally:
            self._is_up = False  # a regular stop logs no warning
            self._lose("this gateway stops")
            if self._line is not None:
                self._line.close()

    async def _connect(self) -> None:
        while True:
            try:
                self._gone.clear()
                _, line = await self._loop.create_unix_connection(
                    lambda: MessageConnection(self._decoder, self._hear, lambda _: self._gone.set()), self._path
                )
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._last_received_at = time.monotonic()
            self._reported = {}
            line.send(self._greeting)
            self._line = line
            return

    async def _until_gone(self) -> None:
        """Returns when the connection ends, or the core is silent for too long."""
        while not self._gone.is_set():
            try:
                async with asyncio.timeout(_SWEEP_S):
                    await self._gone.wait()
            except TimeoutError:
                self._sweep(time.monotonic())

    def _sweep(self, now: float) -> None:
        if self._served:
            self._send(ModelsServed(tuple(self._served)))
            self._served.clear()
        if now - self._last_received_at > SILENCE_S:
            tell = self._log.error if self._is_front else self._log.debug
            tell("the core is silent", seconds=round(now - self._last_received_at, 1))
            self._lose(CORE_SILENT)
            if self._line is not None:
                self._line.close()  # a core that was stopped then cancels our calls and grants a new part
            return
        self._departures.expire(now)
        for number, (future, until) in list(self._asks.items()):
            if now > until and not future.done():
                self._send(CancelInfer(number))
                future.set_exception(DeadlineExceeded("the deadline passed while the gateway's core had the request"))

    def _lose(self, reason: str) -> None:
        """Fails everything that waits for the core, because it is gone."""
        if self._is_up:
            tell = self._log.warning if self._is_front else self._log.debug
            tell("no core", reason=reason)
        self._is_up, self._reason = False, reason
        if self._slab is not None:
            self._slab.forget()
        self._departures.lose()
        waiting: list[asyncio.Future[Any]] = [*(future for future, _ in self._asks.values()), *self._finds.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineUnavailable(reason))

    def _require_line(self) -> MessageConnection[ToClient]:
        if self._line is None or not self._line.is_open:
            raise EngineUnavailable(CORE_GONE)
        return self._line

    def _send(self, record: CancelInfer | SyncDone | CallLate | CallFailed | ModelsServed | EngineSuspected) -> None:
        if self._line is not None:
            self._line.send(record)

    def _hear(self, line: MessageConnection[ToClient], record: ToClient) -> None:
        self._last_received_at = time.monotonic()
        match record:
            case Inferred(number) | RequestFailed(number) | ModelFound(number):
                self._end(number, record)
            case CancelledAt(number, where):
                self._departures.tell(number, where)
            case CoreState():
                self._take(record)
            case Sync(number):
                self._send(SyncDone(number))
            case CallsCut(reason):
                self._cut(reason)
            case SlabPartGranted(lent) if self._slab is not None:
                self._slab.borrow(lent)
            case ClientRejected(reason):
                self._rejection = reason
                line.close()

    def _end(self, number: int, record: Inferred | ModelFound | RequestFailed) -> None:
        """Ends the request with the core's answer, unless it has ended already."""
        future: asyncio.Future[Any] | None = self._finds.get(number)
        if (asked := self._asks.get(number)) is not None:
            future = asked[0]
        self._departures.tell(number)
        if future is None or future.done():
            return
        if isinstance(record, RequestFailed):
            future.set_exception(error_from(record))
        else:
            future.set_result(record.response if isinstance(record, Inferred) else record.config)

    def _take(self, state: CoreState) -> None:
        if state.is_up and not self._is_up:
            tell = self._log.info if self._is_front else self._log.debug
            tell("the core serves", generation=state.generation)
        self._is_up, self._reason, self._generation = state.is_up, state.reason, state.generation
        former = self._models  # an unchanged model stays the earlier object, since values are cached by its config
        self._models = {
            known.name: former[known.name] if former.get(known.name) == known else known for known in state.models
        }
        self._owned, self.apart = frozenset(state.owned), frozenset(state.apart)
        self._left_out = state.left_out
        self._take_state(state)
        self.first_state.set()
        if state.is_up:
            self.first_up.set()
