"""The core's end of the batch socket: tells fronts and guests of the engine, and serves their inferences."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from server.backends.watch import EngineWatch
from server.core.backend import Backend
from server.core.batching import Batching
from server.core.contract import checked_name
from server.core.errors import Overloaded
from server.core.infer import InferResponse
from server.core.leaving import LeftAt, when_known
from server.local.batch_line import ANY_BYTES, FAREWELL_S, SOCKET_NAME, BatchLine
from server.local.direct_asks import DirectAsk, FailuresTold, Queues, enter
from server.local.guest_calls import GuestCalls
from server.local.guests import (
    GREETING_BYTES,
    GREETING_S,
    GUEST_DEAF_BYTES,
    GUEST_UNREAD_BYTES,
    MAX_GUEST_ASKS,
    MAX_GUEST_RECORD_BYTES,
    MAX_GUESTS,
    MAX_NAME,
)
from server.local.lent_slab import Lender
from server.local.limits_page import MAX_PROCESSES
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
    NotServed,
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
_QUESTIONS = (Ask, Find, GiveUp)  # nearly all that comes is an Ask; X | Y would be made anew for each
TOLD_EVERY = 20  # looks, where nothing has changed: fronts hear by it that the core lives

log = get_logger("core")


class _OutOfOrder(Exception):
    """What somebody said that nobody says there. Its text: the reason for which it is served no more."""


@dataclass(slots=True)
class _Front:
    """One that is connected. index: 0 for a guest. name: for the log and, of a guest, for the queue.

    tasks, asks: what it waits for, by its own numbers. known: the last `Know` that it has heard.
    """

    index: int
    name: str
    tasks: dict[int, "asyncio.Task[None]"] = field(default_factory=dict)
    asks: dict[int, DirectAsk] = field(default_factory=dict)
    known: int = 0

    @property
    def is_guest(self) -> bool:
        return not self.index


class CoreServer:
    """Run `run()` as one task. What the gateway owns is batched, everything else goes to the backend alone.

    guests: their inferences, set before `run`; none are welcome without it. queues: of the batching, where it is in
    this process, set before `run`: fronts' inferences wait in them without a task each. apart: set before `run` if
    models have engine processes of their own.
    """

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
        self.guests: GuestCalls | None = None
        self.queues: Queues | None = None
        self.apart: Callable[[], tuple[str, ...]] = tuple
        self._fronts: dict[BatchLine[UP], _Front] = {}
        self._strangers: dict[BatchLine[UP], float] = {}  # since when they have not said who they are
        self._guest_numbers = itertools.count(1)
        self._is_full_told = False
        self._is_draining = False
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

    async def drain(self, grace_s: float) -> bool:
        """Take nothing new of guests, let what they asked for end and be read. Whether all of it did in that time."""
        self._is_draining = True
        guests = {line: front for line, front in self._fronts.items() if front.is_guest}
        tasks = [task for guest in guests.values() for task in guest.tasks.values()]
        running = (await asyncio.wait(tasks, timeout=grace_s))[1] if tasks else set()
        for _ in range(round(FAREWELL_S / LOOK_S)):
            if not any(line.unsent_bytes for line in guests):
                break
            await asyncio.sleep(LOOK_S)
        return not running

    async def spread(self) -> None:
        """Returns when every front knows the models as they are now, so that who changed them meets no older ones.

        Guests are told of the models, and not waited for.
        """
        self._tell(is_due=False)
        self._spreads += 1
        number = self._spreads
        for line, front in self._fronts.items():
            if not front.is_guest:
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
                self._drop_strangers(time.monotonic())
                if self._fronts:
                    self._tell(is_due=looks % TOLD_EVERY == 0)
                    self._lend()
        finally:
            server.close()
            for line in [*self._fronts, *self._strangers]:
                line.close()
                self._lost(line)

    def _new_line(self) -> BatchLine[UP]:
        line = BatchLine(self._decoder, self._hear, self._lost)
        line.max_record_bytes = GREETING_BYTES
        self._strangers[line] = time.monotonic()
        return line

    def _drop_strangers(self, now: float) -> None:
        """Whoever connects and says nothing would hold a descriptor for ever."""
        for line in [line for line, since in self._strangers.items() if now - since > GREETING_S]:
            self._refuse(line, f"it did not say within {GREETING_S:g} s who it is")

    def _state(self) -> State:
        watch = self._watch
        models = tuple(watch.models.values())
        owned = tuple(known.name for known in models if self._owns(known.name))
        return State(watch.is_up, watch.reason, watch.generation, models, owned, self.apart())

    def _tell(self, *, is_due: bool) -> None:
        state = self._state()
        is_new = state != self._told
        if is_due or is_new:
            self._told = state
            for line, front in self._fronts.items():
                if (is_new and not front.is_guest) or line.unsent_bytes <= UNREAD_BYTES:
                    line.send(state)

    def _lend(self) -> None:
        """To those that came, and to all when the slab is another."""
        if self._lender is None:
            return
        for line, front in self._fronts.items():
            if (lent := self._lender.due(line, is_guest=front.is_guest)) is not None:
                line.send(Lend(lent))

    def _hear(self, line: BatchLine[UP], record: UP) -> None:
        try:
            self._take(line, record)
        except _OutOfOrder as error:
            self._refuse(line, str(error))

    def _take(self, line: BatchLine[UP], record: UP) -> None:
        """Raises _OutOfOrder."""
        front = self._fronts.get(line)
        if front is None:
            if not isinstance(record, Hello | Visit):
                raise _OutOfOrder("it did not say first who it is")
            self._welcome(line, record)
        elif isinstance(record, _QUESTIONS):
            self._serve(line, front, record)
        elif isinstance(record, Hello | Visit):
            raise _OutOfOrder("it said twice who it is")
        elif isinstance(record, Known):
            front.known = min(record.number, self._spreads)
            self._has_spread.set()
        elif not front.is_guest:  # what becomes of a guest's inferences is seen here
            self._note(record)

    def _note(self, record: Served | NotServed | Suspect | Late) -> None:
        if isinstance(record, Served):
            for name in record.model_names:
                self._watch.note_served(name)
        elif isinstance(record, Suspect):
            self._watch.suspect()
        elif isinstance(record, NotServed):
            self._watch.note_failed(record.model_name)
        else:
            self._watch.note_late(record.model_name, record.waited_s, is_waiting=record.is_waiting)

    def _welcome(self, line: BatchLine[UP], greeting: Hello | Visit) -> None:
        """Raises _OutOfOrder."""
        if isinstance(greeting, Hello):
            if not 0 < greeting.index < MAX_PROCESSES:
                raise _OutOfOrder(f"there is no front {greeting.index}")
            front = _Front(greeting.index, f"front {greeting.index}")
            line.max_record_bytes = ANY_BYTES
            log.debug("a front came", front=greeting.index)
        elif self.guests is None or self.guest_count >= MAX_GUESTS:
            self._turn_away(line, greeting.name[:MAX_NAME])
            return
        else:
            front = _Front(0, f"guest {next(self._guest_numbers)}")
            line.max_record_bytes = MAX_GUEST_RECORD_BYTES
            log.info("a guest came", guest=greeting.name[:MAX_NAME], name=front.name)
        del self._strangers[line]
        self._fronts[line] = front
        line.send(self._state())

    def _turn_away(self, line: BatchLine[UP], name: str) -> None:
        """It asks again each second: that is told once, until a guest leaves."""
        tell = log.debug if self._is_full_told else log.warning
        tell("a guest is not served", guest=name, guests=self.guest_count)
        self._is_full_told = True
        reason = f"the gateway serves {MAX_GUESTS} other programs of this host already; end one, or use its ports"
        self._end(line, reason if self.guests is not None else "the gateway serves no other programs of this host")

    def _refuse(self, line: BatchLine[UP], reason: str) -> None:
        """Whoever is there does not speak as our programs do."""
        front = self._fronts.get(line)
        log.warning("who does not speak in order is not served", who=front.name if front else "", reason=reason)
        self._end(line, reason)

    def _end(self, line: BatchLine[UP], reason: str) -> None:
        """It is told why, and heard no more."""
        self._lost(line)
        line.send(Unwelcome(reason))
        line.end()

    def _serve(self, line: BatchLine[UP], front: _Front, question: Ask | Find | GiveUp) -> None:
        """Raises _OutOfOrder."""
        number = question.number
        known: DirectAsk | asyncio.Task[None] | None = front.asks.get(number) or front.tasks.get(number)
        if isinstance(question, GiveUp):
            if known is not None:
                known.cancel()
            return
        if known is not None:
            raise _OutOfOrder(f"it asked twice under the number {number}")
        if front.is_guest:
            if (refusal := self._beyond(line, front)) is not None:
                if self.guests is not None and isinstance(question, Ask):
                    self.guests.refused(question, refusal)
                line.send(failed(number, refusal))
                return
        elif (
            isinstance(question, Ask)
            and self.queues is not None
            and enter(self.queues, self._lender, line, question, front.asks)
        ):
            return
        work = self._infer(line, front, question) if isinstance(question, Ask) else self._find(line, question)
        task = front.tasks[number] = asyncio.create_task(work)
        task.add_done_callback(lambda task: self._ended(line, front, question, task))

    def _beyond(self, line: BatchLine[UP], guest: _Front) -> Overloaded | None:
        """What a guest is told that has more here than a guest may have, now. Raises _OutOfOrder."""
        if self._is_draining:
            return Overloaded("this gateway is about to stop; send to another one", reason="draining")
        if line.unsent_bytes > GUEST_DEAF_BYTES:
            raise _OutOfOrder(f"it asks, and has not read {line.unsent_bytes} bytes of answers")
        if line.unsent_bytes > GUEST_UNREAD_BYTES:
            return Overloaded(f"{line.unsent_bytes} bytes of this program's answers are not read; retry after 0.2 s")
        if len(guest.tasks) >= MAX_GUEST_ASKS:
            return Overloaded(f"{len(guest.tasks)} requests of this program wait; retry after 0.2 s")
        return None

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
        self._strangers.pop(line, None)
        front = self._fronts.pop(line, None)
        if front is not None and front.is_guest:
            log.info("a guest is gone", name=front.name, waiting=len(front.tasks))
            self._is_full_told = False
        for task in list(front.tasks.values()) if front is not None else ():
            task.cancel()
        for ask in list(front.asks.values()) if front is not None else ():
            ask.cancel()
        if self._lender is not None:
            self._lender.gone(line)
        self._has_spread.set()

    async def _infer(self, line: BatchLine[UP], front: _Front, ask: Ask) -> None:
        """The root of an inference's task."""
        guests = self.guests
        with FailuresTold(line, ask.number):
            if front.is_guest and guests is not None:
                response = await guests.infer(ask, borrower=line, client=front.name)
            else:
                response = await self._answer(line, ask)
            line.send(Answer(ask.number, response))

    async def _answer(self, line: BatchLine[UP], ask: Ask) -> InferResponse:
        request, batching = ask.request, self._batching
        if self._lender is not None:
            request = self._lender.in_full(request, line)
        if batching is not None and batching.owns(request.model_name):
            return await batching.infer(request, client=ask.client, priority=ask.priority)
        return await self._backend.infer(request)

    def _owns(self, model_name: str) -> bool:
        return self._batching is not None and self._batching.owns(model_name)

    async def _find(self, line: BatchLine[UP], find: Find) -> None:
        """The root of a question's task."""
        with FailuresTold(line, find.number):
            line.send(Found(find.number, await self._watch.find(checked_name(find.model_name))))
