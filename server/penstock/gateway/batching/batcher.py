"""Runs each model's queue under asyncio: requests in, engine calls out, one future per request."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from penstock.gateway.batching.engine_call import BatchEngine, BatchMember, EngineCall
from penstock.gateway.batching.entries import Batch, Stage
from penstock.gateway.batching.merging import key_of, rows_of
from penstock.gateway.batching.options import PRIORITY_LEVELS, BatchOptions, DeclaredOptions, misspelt_parameters
from penstock.gateway.batching.queue import BatchQueue, Dropped, QueueStatistics
from penstock.gateway.tracing import current_trace
from penstock.logs import get_logger
from penstock.protocol.cancellation import CancelStage, note_cancel_stage
from penstock.protocol.engine import Engine
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    ModelNotFound,
    OutOfMemory,
    error_for_client,
)
from penstock.protocol.inference import BatchOwner, InferRequest, InferResponse
from penstock.protocol.shared_memory import Slab

if TYPE_CHECKING:
    from penstock.protocol.engine import ModelConfig


log = get_logger("batcher")
OnBatchFormed = Callable[[str, int], None]
_MIDDLE = PRIORITY_LEVELS // 2


class ModelBatcher:
    """One model's queue and engine calls. Belongs to one event loop."""

    def __init__(
        self,
        model_name: str,
        options: BatchOptions,
        backend: Engine,
        *,
        slab: Slab | None = None,
        formed: OnBatchFormed | None = None,
    ) -> None:
        self.options = options
        self.model_name = model_name
        self._formed = formed
        self._queue = BatchQueue(model_name, options)
        self._engine = BatchEngine(
            backend, options.slots, slab, reads_slab=options.reads_slab, is_queued_again=options.is_queued_again
        )
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[EngineCall, asyncio.Task[bool]] = {}
        self._is_pumping = False
        self._is_worth_halving = True  # False after a batch that failed in every part, until one is answered
        self._timer: asyncio.TimerHandle | None = None
        self._wakeup_at: float | None = None

    def enter(self, request: InferRequest, *, client: str, priority: int) -> BatchMember:
        """Queues the request; cancel it with `leave`. Raises InferenceError."""
        now = time.monotonic()
        member = BatchMember(
            key=None if self.options.unmerged else key_of(request),
            rows=rows_of(request),
            size_bytes=sum([tensor.data.nbytes for tensor in request.inputs]),
            arrived_at=now,
            deadline=request.deadline,
            priority=min(priority, PRIORITY_LEVELS) - 1 if priority > 0 else _MIDDLE,  # protocols begin at 1
            client=client,
            request=request,
            answer=self._loop.create_future(),
            trace=current_trace.get(),
        )
        _fail_dropped(self._queue.push(member, now))
        if not self._is_pumping:  # at the end of this loop iteration: requests that arrive together may share a batch
            self._is_pumping = True
            self._loop.call_soon(self._pump)
        return member

    async def infer(self, request: InferRequest, *, client: str, priority: int) -> InferResponse:
        """See Batcher.infer."""
        member = self.enter(request, client=client, priority=priority)
        try:
            response = await member.answer
        except asyncio.CancelledError as cancelled:
            note_cancel_stage(cancelled, self.leave(member))
            raise
        if member.trace is not None and not member.leads:
            member.trace.stages((("queue", response.timings.queue), ("engine", response.timings.infer)))
        return response

    def refuse_hopeless(self, rows: int, deadline: float) -> None:
        """See Batcher.refuse_hopeless."""
        self._queue.refuse_hopeless(rows, deadline, time.monotonic())

    def statistics(self) -> QueueStatistics:
        return self._queue.statistics()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._tasks and self._queue.statistics().depth == 0

    async def aclose(self, error: InferenceError) -> None:
        """Fails everything that waits or runs with this error."""
        _fail_dropped(self._queue.close(time.monotonic()))
        if self._timer is not None:
            self._timer.cancel()
        tasks = dict(self._tasks)
        for call, task in tasks.items():
            call.fail(error)
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def leave(self, member: BatchMember) -> CancelStage:
        """Cancels the member and frees its row. Returns the stage in which it was."""
        member.answer.cancel()
        if not member.answer.cancelled():  # it was answered at the same moment
            member.answer.exception()
            return CancelStage.BATCH
        stage = self._queue.cancel(member, time.monotonic())
        if member.call is not None:
            member.call.left()
        return CancelStage.QUEUE if stage is Stage.QUEUE else CancelStage.BATCH

    def _pump(self) -> None:
        self._is_pumping = False
        now = time.monotonic()
        _fail_dropped(self._queue.expire(now))
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
        """Root of a batch's task. Returns whether the queue was pumped after the call."""
        try:
            return await self._serve(call)
        except Exception as error:
            log.exception("a batch failed unexpectedly")
            self._queue.failed(call.batch, time.monotonic())
            call.fail(error_for_client(error))
            return False

    def _ended(self, call: EngineCall, task: "asyncio.Task[bool]") -> None:
        """Done callback, because a task cancelled before its first step runs none of its code."""
        call.close()
        del self._tasks[call]
        if task.cancelled():  # because no member waits any more, or by the engine itself: then members wait
            call.fail(EngineFailed(f"the engine cancelled the call of model {self.model_name!r}"))
        if task.cancelled() and call.is_overdue:
            self._queue.done(call.batch, time.monotonic())  # at least this long, which improves the fit
        elif task.cancelled():
            self._queue.released(call.batch, time.monotonic())
        elif task.result():
            return
        self._pump()

    async def _serve(self, call: EngineCall) -> bool:
        """Returns whether the engine answered. Pumps the queue before the responses are delivered."""
        try:
            merged, response = await call.ask()
        except InferenceError as error:
            await self._end_failed(call, error)
            return False
        self._is_worth_halving = True
        answered_at = time.monotonic()
        self._queue.done(call.batch, answered_at)
        self._pump()  # the engine gets its next batch before this one's responses are delivered
        call.deliver(merged, response)
        self._loop.call_soon(self._delivered, call, answered_at)  # after the members' tasks
        return True

    async def _end_failed(self, call: EngineCall, error: InferenceError) -> None:
        if self.options.is_queued_again and isinstance(error, DeadlineExceeded):  # the engine's queue dropped it
            call.fail(error)
            self._queue.done(call.batch, time.monotonic())  # it took at least this long, which improves the fit
            return
        if self._is_worth_halving:
            self._is_worth_halving = await call.settle(error, call.members) or len(call.members) == 1
        else:
            call.fail(error)
        self._queue.failed(call.batch, time.monotonic(), out_of_memory=isinstance(error, OutOfMemory))

    def _delivered(self, call: EngineCall, answered_at: float) -> None:
        """Runs after every member's task has encoded its response and written it to its socket."""
        self._queue.delivered(call.batch, time.monotonic() - answered_at)


class BatcherPool:
    """Queues of all models that the gateway batches, created on first use."""

    def __init__(
        self,
        backend: Engine,
        options_of: Callable[[str], BatchOptions | None],
        *,
        slab: Slab | None = None,
        formed: OnBatchFormed | None = None,
    ) -> None:
        """options_of: a model's options, None if unknown. formed: called with model and rows of every batch."""
        self._backend = backend
        self._formed = formed
        self._options_of = options_of
        self._slab = slab
        self._batchers: dict[str, ModelBatcher] = {}
        self._retired: list[ModelBatcher] = []  # with earlier options; some still have requests
        self._ended: dict[str, QueueStatistics] = {}  # sums over batchers that have ended

    def owns(self, model_name: str) -> bool:
        options = self._options_of(model_name)
        return options is not None and options.owner is BatchOwner.GATEWAY

    def refuse_hopeless(self, model_name: str, *, rows: int, deadline: float | None) -> None:
        """See Batcher.refuse_hopeless."""
        batcher = self._batchers.get(model_name)
        if batcher is not None and deadline is not None:
            batcher.refuse_hopeless(rows, deadline)

    async def infer(self, request: InferRequest, *, client: str, priority: int = 0) -> InferResponse:
        """See Batcher.infer. The request was validated for its model."""
        name = request.model_name
        batcher = self._batcher(name, self._options_of(name))
        return await batcher.infer(request, client=client, priority=priority)

    def enter(
        self, request: InferRequest, *, client: str, priority: int = 0
    ) -> tuple[ModelBatcher, BatchMember] | None:
        """Like infer, without waiting; None if the gateway does not batch the model. Raises InferenceError."""
        options = self._options_of(request.model_name)
        if options is None or options.owner is not BatchOwner.GATEWAY:
            return None
        batcher = self._batcher(request.model_name, options)
        return batcher, batcher.enter(request, client=client, priority=priority)

    def statistics(self) -> Mapping[str, QueueStatistics]:
        """Statistics by model with requests, including earlier batchers."""
        found = {name: batcher.statistics() for name, batcher in self._batchers.items()}
        for batcher in self._retired:
            found[batcher.model_name] = found[batcher.model_name].with_former(batcher.statistics())
        for name, ended in self._ended.items():
            found[name] = found[name].with_former(ended)
        return found

    async def aclose(self) -> None:
        """Fails every request that waits or runs; after a drain there are none."""
        error = EngineUnavailable("this gateway stopped before the answer came; send to another one")
        for batcher in (*self._batchers.values(), *self._retired):
            await batcher.aclose(error)

    def _batcher(self, model_name: str, options: BatchOptions | None) -> ModelBatcher:
        """The model's batcher with its current options. An earlier one finishes, without new requests."""
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


def _fail_dropped(dropped: "Iterable[Dropped]") -> None:
    for drop in dropped:
        if isinstance(drop.entry, BatchMember) and not drop.entry.answer.done():
            drop.entry.answer.set_exception(drop.error)


_options_log = get_logger("batching")


def log_and_get_refusal(options: DeclaredOptions, config: "ModelConfig") -> str:
    """Why the model cannot be served as declared, or "". Logs misspelt options: call once per load."""
    for name, meant in misspelt_parameters(config).items():
        _options_log.warning("parameter is not read", model=config.name, parameter=name, did_you_mean=meant)
    return options.refusal(config)
