"""A front's or guest's link to its core: the engine as that sees it, and inferences whose batches the core forms."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec

from server.backends.core_relay import CORE_GONE
from server.backends.known_model import KnownModel
from server.core.errors import BackendUnavailable, DeadlineExceeded, InferenceError, InvalidRequest, Overloaded
from server.core.infer import InferRequest, InferResponse
from server.core.leaving import LeftAt, leaving
from server.core.model import ModelConfig
from server.core.slab import Lease
from server.local.batch_line import SOCKET_NAME, BatchLine
from server.local.departures import Departures
from server.local.lent_slab import BorrowedSlab, by_place
from server.local.messages import (
    DOWN,
    Answer,
    Ask,
    Cut,
    Failed,
    Find,
    Found,
    GiveUp,
    Hello,
    Know,
    Known,
    Late,
    Left,
    Lend,
    NotServed,
    Served,
    State,
    Suspect,
    Unwelcome,
    Visit,
    error_of,
)
from server.logs import get_logger

CORE_SILENT = "the gateway's core does not answer; retry in a second"
SILENCE_S = 5.0
FIND_PATIENCE_S = 5.0
LATE_S = 0.25  # beyond a deadline, which the core keeps itself, before the front gives an answer up
_SWEEP_S = 0.1
_RECONNECT_S = 0.05
_ASK_AGAIN_S = 1.0  # whether a guest that is not welcome is so by now
_NOBODY: Mapping[str, KnownModel] = MappingProxyType({})

log = get_logger("front")


class _Question(Protocol):
    """What waits for the core's word."""

    def set_exception(self, error: BaseException, /) -> None: ...


class CoreLink:
    """EngineView and Batching of a front. Run `run()` as one task; call the rest from the same event loop.

    greeting: which of the fronts this is, or which guest. max_asks: inferences that may wait for the core at once.
    slab: what large tensors are put into, and not sent; its room is the core's, which lends it.
    While there is no core the engine is not up, and everything that waited for it fails as BackendUnavailable.
    """

    def __init__(
        self, run_dir: Path, greeting: Hello | Visit, *, max_asks: int, slab: BorrowedSlab | None = None
    ) -> None:
        self._path = str(run_dir / SOCKET_NAME)
        self._greeting = greeting
        self._is_front = isinstance(greeting, Hello)  # a guest's program tells people in its own words
        self._log = log.bind(front=greeting.index) if isinstance(greeting, Hello) else log.bind(guest=greeting.name)
        self._unwelcome = ""
        self._max_asks = max_asks
        self._slab = slab
        self._decoder: msgspec.msgpack.Decoder[DOWN] = msgspec.msgpack.Decoder(DOWN)
        self._line: BatchLine[DOWN] | None = None
        self._is_up = False
        self._reason = "the gateway's core has not answered yet"
        self._generation = 0
        self._models: Mapping[str, KnownModel] = _NOBODY
        self._owned: frozenset[str] = frozenset()
        self.apart: frozenset[str] = frozenset()  # models with an engine process of their own, which the core calls
        self._cut: Callable[[str], None] = lambda _: None
        self._numbers = itertools.count(1)
        self._asks: dict[int, tuple[asyncio.Future[InferResponse], float]] = {}
        self._finds: dict[int, asyncio.Future[ModelConfig]] = {}
        self._departures = Departures()
        self._served: set[str] = set()
        self._heard_at = 0.0
        self._gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.first_state = asyncio.Event()  # the core has said how the engine is, up or not
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

    def when_silent(self, cut: Callable[[str], None]) -> None:
        """Whom to tell, with the reason, that calls in the engine will not be answered any more."""
        self._cut = cut

    def suspect(self) -> None:
        """A call could not reach the engine: the core is told."""
        self._send(Suspect())

    def note_late(self, model_name: str, waited_s: float, *, is_waiting: bool = False) -> None:
        """A call ended without an answer, or waits long: sent to the core."""
        self._send(Late(model_name, waited_s, is_waiting))

    def note_failed(self, model_name: str) -> None:
        """A client's inference failed in the engine: sent to the core."""
        self._send(NotServed(model_name))

    def note_served(self, model_name: str) -> None:
        """Told to the core now and then, not each time."""
        self._served.add(model_name)

    async def note_loaded(self, model_name: str) -> None:
        """The core has loaded it, and knows."""

    def note_unloaded(self, model_name: str) -> None:
        """The core has unloaded it, and knows."""

    async def find(self, model_name: str) -> ModelConfig:
        """The config of a ready model, asked of the core where it is new. Raises what the core says."""
        known = self._models.get(model_name)
        if known is not None and known.is_ready and known.config is not None:
            return known.config
        number = next(self._numbers)
        future: asyncio.Future[ModelConfig] = self._loop.create_future()
        self._finds[number] = future
        try:
            self._require_line().send(Find(number, model_name))
            async with asyncio.timeout(FIND_PATIENCE_S):
                return await future
        except TimeoutError as error:
            raise BackendUnavailable(CORE_SILENT) from error
        finally:
            self._finds.pop(number, None)

    # Batching

    def owns(self, model_name: str) -> bool:
        """Whether the core forms that model's batches."""
        return model_name in self._owned

    def refuse_hopeless(self, model_name: str, *, rows: int, deadline: float | None) -> None:
        """What waits is known to the core, which refuses the request when it comes."""

    async def infer(self, request: InferRequest, *, client: str, priority: int = 0) -> InferResponse:
        """See Batching.infer."""
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
            asked, leases = (request, leases) if self._slab is None else by_place(request, self._slab)
            _send_ask(line, Ask(number, asked, client, priority))
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
        """Its caller is gone, and does not wait until the core has said where the request was."""
        otherwise = LeftAt.BATCH if self.owns(model_name) else LeftAt.ENGINE
        if future.cancelled() and self._line is not None and self._line.is_open:
            leaving(cancelled, self._departures.wait(number, otherwise, time.monotonic()))
            self._line.send(GiveUp(number))
            return
        if not future.cancelled():  # its end came in the same moment
            future.exception()
        leaving(cancelled, otherwise)

    # the line

    async def run(self) -> None:
        """Connects, again and again, for ever; ends by cancellation only."""
        try:
            while True:
                await self._connect()
                await self._until_gone()
                self._lose(self._unwelcome or CORE_GONE)
                await asyncio.sleep(_ASK_AGAIN_S if self._unwelcome else _RECONNECT_S)
                self._unwelcome = ""
        finally:
            self._is_up = False  # in order: nobody is warned of it
            self._lose("this gateway stops")
            if self._line is not None:
                self._line.close()

    async def _connect(self) -> None:
        while True:
            try:
                self._gone.clear()
                _, line = await self._loop.create_unix_connection(self._new_line, self._path)
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._heard_at = time.monotonic()
            line.send(self._greeting)
            self._line = line
            return

    def _new_line(self) -> BatchLine[DOWN]:
        return BatchLine(self._decoder, self._hear, lambda _: self._gone.set())

    async def _until_gone(self) -> None:
        """Until the connection ends, or the core says nothing for too long."""
        while not self._gone.is_set():
            try:
                async with asyncio.timeout(_SWEEP_S):
                    await self._gone.wait()
            except TimeoutError:
                self._sweep(time.monotonic())

    def _sweep(self, now: float) -> None:
        if self._served:
            self._send(Served(tuple(self._served)))
            self._served.clear()
        if now - self._heard_at > SILENCE_S:
            tell = self._log.error if self._is_front else self._log.debug
            tell("the core is silent", seconds=round(now - self._heard_at, 1))
            self._lose(CORE_SILENT)
            if self._line is not None:
                self._line.close()  # when it speaks again it gives up what was asked here, and lends its slab anew
            return
        self._departures.expire(now)
        for number, (future, until) in list(self._asks.items()):
            if now > until and not future.done():
                self._send(GiveUp(number))
                future.set_exception(DeadlineExceeded("the deadline passed while the gateway's core had the request"))

    def _lose(self, reason: str) -> None:
        """The core says nothing any more: nobody waits for it."""
        if self._is_up:
            tell = self._log.warning if self._is_front else self._log.debug
            tell("no core", reason=reason)
        self._is_up, self._reason = False, reason
        if self._slab is not None:
            self._slab.forget()
        self._departures.lose()
        waiting: list[_Question] = [
            *(future for future, _ in self._asks.values() if not future.done()),
            *(future for future in self._finds.values() if not future.done()),
        ]
        for question in waiting:
            question.set_exception(BackendUnavailable(reason))

    def _require_line(self) -> BatchLine[DOWN]:
        if self._line is None or not self._line.is_open:
            raise BackendUnavailable(CORE_GONE)
        return self._line

    def _send(self, record: GiveUp | Known | Late | NotServed | Served | Suspect) -> None:
        if self._line is not None:
            self._line.send(record)

    def _hear(self, line: BatchLine[DOWN], record: DOWN) -> None:
        self._heard_at = time.monotonic()
        match record:
            case Answer(number, response):
                self._answer(number, response)
            case Failed(number):
                self._fail(number, error_of(record))
            case Left(number, where):
                self._departures.tell(number, where)
            case State():
                self._take(record)
            case Found(number, config):
                self._found(number, config)
            case Know(number):
                self._send(Known(number))
            case Cut(reason):
                self._cut(reason)
            case Lend(lent) if self._slab is not None:
                self._slab.borrow(lent)
            case Unwelcome(reason):
                self._unwelcome = reason
                line.close()

    def _answer(self, number: int, response: InferResponse) -> None:
        asked = self._asks.get(number)
        if asked is not None and not asked[0].done():
            asked[0].set_result(response)
        self._departures.tell(number)

    def _found(self, number: int, config: ModelConfig) -> None:
        future = self._finds.get(number)
        if future is not None and not future.done():
            future.set_result(config)

    def _fail(self, number: int, error: InferenceError) -> None:
        asked = self._asks.get(number)
        future: _Question | None = asked[0] if asked is not None else self._finds.get(number)
        if isinstance(future, asyncio.Future) and not future.done():
            future.set_exception(error)
        self._departures.tell(number)

    def _take(self, state: State) -> None:
        if state.is_up and not self._is_up:
            tell = self._log.info if self._is_front else self._log.debug
            tell("the core serves", generation=state.generation)
        self._is_up, self._reason, self._generation = state.is_up, state.reason, state.generation
        self._models = {known.name: self._same(known) for known in state.models}
        self._owned, self.apart = frozenset(state.owned), frozenset(state.apart)
        self.first_state.set()
        if state.is_up:
            self.first_up.set()

    def _same(self, known: KnownModel) -> KnownModel:
        """The model as it was known here, where nothing of it has changed: what is kept of a config stays good."""
        former = self._models.get(known.name)
        return former if former == known else known


def _send_ask(line: BatchLine[DOWN], ask: Ask) -> None:
    """Raises InvalidRequest for what no record can hold."""
    try:
        line.send(ask)
    except (OverflowError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be handed to the gateway's core: {error}") from error
