"""The queue of each model, driven by asyncio: requests in, engine calls out, every request one future."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from server.batching.engine_call import Engine, EngineCall, Member
from server.batching.entry import Batch, Stage
from server.batching.merge import key_of, rows_of
from server.batching.options import PRIORITY_LEVELS, BatchOptions
from server.batching.queue import BatchQueue, Dropped, QueueStatistics
from server.core.backend import Backend
from server.core.batching import Owner
from server.core.errors import BackendUnavailable, InferenceError, ModelNotFound, OutOfMemory
from server.core.infer import InferRequest, InferResponse
from server.core.leaving import LeftAt, leaving
from server.core.slab import Slab
from server.logs import get_logger
from server.tracing.trace import current_trace

log = get_logger("batcher")
Formed = Callable[[str, int], None]
_MIDDLE = PRIORITY_LEVELS // 2


class ModelBatcher:
    """One model's queue and the engine calls that it is at. All members belong to one event loop."""

    def __init__(
        self,
        model_name: str,
        options: BatchOptions,
        backend: Backend,
        *,
        slab: Slab | None = None,
        formed: Formed | None = None,
    ) -> None:
        self.options = options
        self.model_name = model_name
        self._formed = formed
        self._queue = BatchQueue(model_name, options)
        self._engine = Engine(backend, options.slots, slab)
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[EngineCall, asyncio.Task[bool]] = {}
        self._is_pumping = False
        self._is_worth_halving = True  # until a batch of which no part was answered, and again once one is
        self._timer: asyncio.TimerHandle | None = None
        self._wakeup_at: float | None = None

    def enter(self, request: InferRequest, *, client: str, priority: int) -> Member:
        """The request in the queue; who gives it up calls `leave`. Raises of the InferenceError tree."""
        now = time.monotonic()
        member = Member(
            key=None if self.options.unmerged else key_of(request),
            rows=rows_of(request),
            size_bytes=sum([tensor.data.nbytes for tensor in request.inputs]),
            arrived_at=now,
            deadline=request.deadline,
            priority=_level(priority),
            client=client,
            request=request,
            answer=self._loop.create_future(),
            trace=current_trace.get(),
        )
        _end(self._queue.push(member, now))
        if not self._is_pumping:  # once a turn of the loop: what arrives together may go together
            self._is_pumping = True
            self._loop.call_soon(self._pump)
        return member

    async def infer(self, request: InferRequest, *, client: str, priority: int) -> InferResponse:
        """See Batching.infer."""
        member = self.enter(request, client=client, priority=priority)
        try:
            response = await member.answer
        except asyncio.CancelledError as cancelled:
            leaving(cancelled, self.leave(member))
            raise
        if member.trace is not None and not member.leads:
            member.trace.stages((("queue", response.timings.queue), ("engine", response.timings.infer)))
        return response

    def refuse_hopeless(self, rows: int, deadline: float) -> None:
        """See Batching.refuse_hopeless."""
        self._queue.refuse_hopeless(rows, deadline, time.monotonic())

    def statistics(self) -> QueueStatistics:
        """Of the queue, as it is now."""
        return self._queue.statistics()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._tasks and self._queue.statistics().depth == 0

    async def aclose(self, error: InferenceError) -> None:
        """End what waits and what runs; every caller gets the error."""
        _end(self._queue.close(time.monotonic()))
        if self._timer is not None:
            self._timer.cancel()
        tasks = dict(self._tasks)
        for call, task in tasks.items():
            call.fail(error)
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def leave(self, member: Member) -> LeftAt:
        """Nobody waits for the member any longer: its place is another's at once. Where it was."""
        member.answer.cancel()
        if not member.answer.cancelled():  # its end came in the same moment
            member.answer.exception()
            return LeftAt.BATCH
        stage = self._queue.cancel(member, time.monotonic())
        if member.call is not None:
            member.call.left()
        return LeftAt.QUEUE if stage is Stage.QUEUE else LeftAt.BATCH

    def _pump(self) -> None:
        """Form every batch that is due now, and see to it that the next one is looked for in time."""
        self._is_pumping = False
        now = time.monotonic()
        _end(self._queue.expire(now))
        while isinstance(due := self._queue.due(now), Batch):
            if self._formed is not None:
                self._formed(self.model_name, due.rows)
            call = EngineCall(due, self._engine, self._abandon)
            task = self._tasks[call] = self._loop.create_task(self._run(call))
            task.add_done_callback(partial(self._ended, call))
        self._wake_at(self._queue.next_wakeup(now, due), now)

    def _wake_at(self, wakeup_at: float | None, now: float) -> None:
        if wakeup_at == self._wakeup_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakeup_at, self._timer = wakeup_at, None
        if wakeup_at is not None:
            self._timer = self._loop.call_later(max(wakeup_at - now, 0.0), self._wake)

    def _wake(self) -> None:
        self._wakeup_at = self._timer = None
        self._pump()

    def _abandon(self, call: EngineCall) -> None:
        task = self._tasks.get(call)
        if task is not None:
            task.cancel()

    async def _run(self, call: EngineCall) -> bool:
        """The root of a batch's task. Whether what is due was looked for since its end."""
        try:
            return await self._serve(call)
        except Exception:
            log.exception("a batch failed unexpectedly")
            self._queue.failed(call.batch, time.monotonic())
            call.fail(InferenceError("internal error"))
            return False

    def _ended(self, call: EngineCall, task: "asyncio.Task[bool]") -> None:
        """Here, since a task that is cancelled before its first step never reaches a line of its own."""
        call.close()
        del self._tasks[call]
        if task.cancelled() and call.is_overdue:
            self._queue.done(call.batch, time.monotonic())  # it takes at least as long, which is to be learned
        elif task.cancelled():
            self._queue.released(call.batch, time.monotonic())
        elif task.result():
            return
        self._pump()

    async def _serve(self, call: EngineCall) -> bool:
        """Whether the engine answered, and has its next batch."""
        try:
            merged, response = await call.ask()
        except InferenceError as error:
            if self._is_worth_halving:
                self._is_worth_halving = await call.settle(error) or len(call.members) == 1
            else:
                call.fail(error)
            self._queue.failed(call.batch, time.monotonic(), out_of_memory=isinstance(error, OutOfMemory))
            return False
        self._is_worth_halving = True
        answered_at = time.monotonic()
        self._queue.done(call.batch, answered_at)
        self._pump()  # the engine has its next batch before this one's answers are told
        call.deliver(merged, response)
        self._loop.call_soon(self._delivered, call, answered_at)  # behind the members' own turns
        return True

    def _delivered(self, call: EngineCall, answered_at: float) -> None:
        """Every member's task has gone as far as it goes at once: its answer is encoded and handed to its socket."""
        self._queue.delivered(call.batch, time.monotonic() - answered_at)


class Ticket:
    """A request in a queue, for who waits for it without a task. answer: see Member.answer."""

    __slots__ = ("_batcher", "_member", "answer")

    def __init__(self, batcher: ModelBatcher, member: Member) -> None:
        self._batcher = batcher
        self._member = member
        self.answer = member.answer

    def leave(self) -> LeftAt:
        """Nobody waits for it any longer. Where it was."""
        return self._batcher.leave(self._member)


class BatcherPool:
    """Batching over an engine: a queue for each model that the gateway owns, made when it is first asked for."""

    def __init__(
        self,
        backend: Backend,
        options_of: Callable[[str], BatchOptions | None],
        *,
        slab: Slab | None = None,
        formed: Formed | None = None,
    ) -> None:
        """options_of: of a model that is served; None for one that is not known. slab: what the engine reads from.

        formed: told the model and the rows of every batch.
        """
        self._backend = backend
        self._formed = formed
        self._options_of = options_of
        self._slab = slab
        self._batchers: dict[str, ModelBatcher] = {}
        self._retired: list[ModelBatcher] = []  # of former options; some still have requests
        self._ended: dict[str, QueueStatistics] = {}  # sums over batchers that have ended

    def owns(self, model_name: str) -> bool:
        """Whether the gateway forms that model's batches now."""
        options = self._options_of(model_name)
        return options is not None and options.owner is Owner.GATEWAY

    def refuse_hopeless(self, model_name: str, *, rows: int, deadline: float | None) -> None:
        """See Batching.refuse_hopeless."""
        batcher = self._batchers.get(model_name)
        if batcher is not None and deadline is not None:
            batcher.refuse_hopeless(rows, deadline)

    async def infer(self, request: InferRequest, *, client: str, priority: int = 0) -> InferResponse:
        """See Batching.infer. The request is good for its model: names, datatypes, shapes, rows."""
        name = request.model_name
        batcher = self._batcher(name, self._options_of(name))
        return await batcher.infer(request, client=client, priority=priority)

    def enter(self, request: InferRequest, *, client: str, priority: int = 0) -> Ticket | None:
        """The same without waiting, of a model that it owns; None for others.

        Raises of the InferenceError tree what is known now.
        """
        options = self._options_of(request.model_name)
        if options is None or options.owner is not Owner.GATEWAY:
            return None
        batcher = self._batcher(request.model_name, options)
        return Ticket(batcher, batcher.enter(request, client=client, priority=priority))

    def statistics(self) -> Mapping[str, QueueStatistics]:
        """By model name, for every model that had a request; includes its earlier batchers."""
        found = {name: batcher.statistics() for name, batcher in self._batchers.items()}
        for batcher in self._retired:
            found[batcher.model_name] = found[batcher.model_name].with_former(batcher.statistics())
        for name, ended in self._ended.items():
            found[name] = found[name].with_former(ended)
        return found

    async def aclose(self) -> None:
        """End every request that waits or runs: after the drain there should be none."""
        error = BackendUnavailable("this gateway stopped before the answer came; send to another one")
        for batcher in (*self._batchers.values(), *self._retired):
            await batcher.aclose(error)

    def _batcher(self, model_name: str, options: BatchOptions | None) -> ModelBatcher:
        """The model's batcher by its options of now; one of other options ends what it has, and gets no more."""
        known = self._batchers.get(model_name)
        if known is not None and (options is known.options or options == known.options):
            return known
        if options is None:
            raise ModelNotFound(f"Request for unknown model: '{model_name}' is not found")
        if known is not None:
            self._retire(known)
        batcher = self._batchers[model_name] = ModelBatcher(
            model_name, options, self._backend, slab=self._slab, formed=self._formed
        )
        return batcher

    def _retire(self, batcher: ModelBatcher) -> None:
        for idle in [one for one in self._retired if one.is_idle]:
            self._retired.remove(idle)
            former, now = self._ended.get(idle.model_name), idle.statistics()
            self._ended[idle.model_name] = now if former is None else now.with_former(former)
        self._retired.append(batcher)


def _level(priority: int) -> int:
    """As the queue counts, 0 the first: v2 counts from 1, and 0 stands for the middle."""
    return min(priority, PRIORITY_LEVELS) - 1 if priority > 0 else _MIDDLE


def _end(dropped: "Iterable[Dropped]") -> None:
    """Tell those that the queue gave up."""
    for drop in dropped:
        if isinstance(drop.entry, Member) and not drop.entry.answer.done():
            drop.entry.answer.set_exception(drop.error)
