"""The core's end of the batch socket: tells fronts and guests of the engine, and serves their inferences."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from server.backends.watch import EngineWatch
from server.core.backend import Backend
from server.core.batching import Batching
from server.core.errors import InferenceError, Overloaded
from server.core.infer import InferResponse
from server.core.leaving import LeftAt, when_known
from server.local.batch_line import SOCKET_NAME, BatchLine
from server.local.guests import MAX_GUEST_ASKS, MAX_GUESTS
from server.local.lent_slab import Lender
from server.local.messages import (
    UP,
    Answer,
    Ask,
    Cut,
    Find,
    Found,
    GiveUp,
    Hello,
    Know,
    Known,
    Late,
    Left,
    Lend,
    Served,
    State,
    Suspect,
    Unwelcome,
    Visit,
    failed,
)
from server.logs import get_logger

LOOK_S = 0.05
SPREAD_S = 0.5  # beyond it a front that does not say that it knows is not waited for
UNREAD_BYTES = 1 << 20  # a front that has left so much unread is told news alone: that the core lives can wait
TOLD_EVERY = 20  # looks, where nothing has changed: fronts hear by it that the core lives

log = get_logger("core")


@dataclass(slots=True)
class _Front:
    """One that is connected. index: 0 for a guest. tasks: what it waits for, by its own numbers.

    known: the last `Know` that it has heard.
    """

    index: int
    tasks: dict[int, "asyncio.Task[None]"]
    known: int = 0

    @property
    def is_guest(self) -> bool:
        return not self.index


class CoreServer:
    """Run `run()` as one task. What the gateway owns is batched, everything else goes to the backend alone."""

    def __init__(
        self,
        run_dir: Path,
        watch: EngineWatch,
        backend: Backend,
        batching: Batching | None,
        *,
        lender: Lender | None = None,
    ) -> None:
        """lender: of the slab, where there is one; each front gets a part of it, and so do guests."""
        self._path = run_dir / SOCKET_NAME
        self._watch = watch
        self._backend = backend
        self._batching = batching
        self._lender = lender
        self._decoder: msgspec.msgpack.Decoder[UP] = msgspec.msgpack.Decoder(UP)
        self._fronts: dict[BatchLine[UP], _Front] = {}
        self._told: State | None = None
        self._spreads = 0
        self._has_spread = asyncio.Event()

    @property
    def front_count(self) -> int:
        """Fronts that are connected."""
        return sum(1 for front in self._fronts.values() if not front.is_guest)

    @property
    def guest_count(self) -> int:
        """Guests that are connected."""
        return len(self._fronts) - self.front_count

    def cut(self, reason: str) -> None:
        """Tell fronts and guests that what they have in the engine will not be answered any more."""
        for line in self._fronts:
            line.send(Cut(reason))

    async def spread(self) -> None:
        """Returns when every front knows the models as they are now, so that who changed them meets no older ones.

        Guests are told, and not waited for.
        """
        self._tell(is_due=False)
        self._spreads += 1
        number = self._spreads
        for line in self._fronts:
            line.send(Know(number))
        try:
            async with asyncio.timeout(SPREAD_S):
                while any(front.known < number and not front.is_guest for front in self._fronts.values()):
                    self._has_spread.clear()
                    await self._has_spread.wait()
        except TimeoutError:
            log.warning("a front does not say that it knows of a change", seconds=SPREAD_S)

    async def run(self) -> None:
        """Listens and tells, for ever. Ends by cancellation only, and ends what runs then."""
        self._path.unlink(missing_ok=True)
        server = await asyncio.get_running_loop().create_unix_server(self._new_line, str(self._path))
        looks = 0
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                looks += 1
                if self._fronts:
                    self._tell(is_due=looks % TOLD_EVERY == 0)
                    self._lend()
        finally:
            server.close()
            for line in list(self._fronts):
                line.close()
                self._lost(line)

    def _new_line(self) -> BatchLine[UP]:
        return BatchLine(self._decoder, self._hear, self._lost)

    def _state(self) -> State:
        watch = self._watch
        models = tuple(watch.models.values())
        owned = tuple(known.name for known in models if self._owns(known.name))
        return State(watch.is_up, watch.reason, watch.generation, models, owned)

    def _tell(self, *, is_due: bool) -> None:
        state = self._state()
        is_new = state != self._told
        if is_due or is_new:
            self._told = state
            for line in self._fronts:
                if is_new or line.unsent_bytes <= UNREAD_BYTES:
                    line.send(state)

    def _lend(self) -> None:
        """To those that came, and to all when the slab is another."""
        if self._lender is None:
            return
        for line, front in self._fronts.items():
            if (lent := self._lender.due(line, is_guest=front.is_guest)) is not None:
                line.send(Lend(lent))

    def _hear(self, line: BatchLine[UP], record: UP) -> None:
        if isinstance(record, Hello):
            self._fronts[line] = _Front(record.index, {})
            line.send(self._state())
            log.debug("a front came", front=record.index)
        elif isinstance(record, Visit):
            self._receive(line, record)
        elif isinstance(record, Known):
            self._fronts[line].known = record.number
            self._has_spread.set()
        elif isinstance(record, Served):
            for name in record.model_names:
                self._watch.note_served(name)
        elif isinstance(record, Suspect):
            self._watch.suspect()
        elif isinstance(record, Late):
            self._watch.note_late()
        elif (front := self._fronts.get(line)) is not None:
            self._serve(line, front, record)

    def _receive(self, line: BatchLine[UP], visit: Visit) -> None:
        if self.guest_count >= MAX_GUESTS:
            reason = f"the gateway serves {MAX_GUESTS} other programs of this host already; end one, or use its ports"
            line.send(Unwelcome(reason))
            log.warning("a guest is not served", guest=visit.name, guests=self.guest_count)
            return  # and heard no more: what is not known here is not served
        self._fronts[line] = _Front(0, {})
        line.send(self._state())
        log.info("a guest came", guest=visit.name)

    def _serve(self, line: BatchLine[UP], front: _Front, question: Ask | Find | GiveUp) -> None:
        number = question.number
        if front.is_guest and len(front.tasks) >= MAX_GUEST_ASKS and not isinstance(question, GiveUp):
            line.send(
                failed(number, Overloaded(f"{len(front.tasks)} requests of this program wait; retry after 0.2 s"))
            )
            return
        if isinstance(question, GiveUp):
            if (task := front.tasks.get(number)) is not None:
                task.cancel()
            return
        work = self._infer(line, question) if isinstance(question, Ask) else self._find(line, question)
        task = front.tasks[number] = asyncio.create_task(work)
        task.add_done_callback(lambda task: self._ended(line, front, question, task))

    def _ended(self, line: BatchLine[UP], front: _Front, question: Ask | Find, task: "asyncio.Task[None]") -> None:
        front.tasks.pop(question.number, None)
        if isinstance(question, Ask) and task.cancelled():
            self._tell_where(line, question, task)

    def _tell_where(self, line: BatchLine[UP], ask: Ask, task: "asyncio.Task[None]") -> None:
        """Of a request that was given up: one that the gateway owns, and that nobody noted, had not even begun."""
        otherwise = LeftAt.QUEUE if self._owns(ask.request.model_name) else LeftAt.ENGINE
        try:
            task.result()
        except asyncio.CancelledError as cancelled:
            when_known(cancelled, otherwise, lambda where: line.send(Left(ask.number, where)))

    def _lost(self, line: BatchLine[UP]) -> None:
        """The front is gone: nobody waits for what it asked."""
        front = self._fronts.pop(line, None)
        for task in list(front.tasks.values()) if front is not None else ():
            task.cancel()
        if self._lender is not None:
            self._lender.gone(line)
        self._has_spread.set()

    async def _infer(self, line: BatchLine[UP], ask: Ask) -> None:
        async def work() -> None:
            line.send(Answer(ask.number, await self._answer(ask)))

        await self._guarded(line, ask.number, work)

    async def _answer(self, ask: Ask) -> InferResponse:
        request, batching = ask.request, self._batching
        if self._lender is not None:
            request = self._lender.in_full(request)
        if batching is not None and batching.owns(request.model_name):
            return await batching.infer(request, client=ask.client, priority=ask.priority)
        return await self._backend.infer(request)

    def _owns(self, model_name: str) -> bool:
        return self._batching is not None and self._batching.owns(model_name)

    async def _find(self, line: BatchLine[UP], find: Find) -> None:
        async def work() -> None:
            line.send(Found(find.number, await self._watch.find(find.model_name)))

        await self._guarded(line, find.number, work)

    @staticmethod
    async def _guarded(line: BatchLine[UP], number: int, work: Callable[[], Awaitable[None]]) -> None:
        """The root of a question's task: every failure is told as itself."""
        try:
            await work()
        except InferenceError as error:
            line.send(failed(number, error))
        except Exception:  # a bug of ours: logged here, and the front learns no more
            log.exception("a front's question failed unexpectedly")
            line.send(failed(number, InferenceError("internal error")))
