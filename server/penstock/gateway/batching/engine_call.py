"""One batch at the engine: one call with its members' rows, and a result or an error for each member."""

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

from penstock.engines.torch_serving.slab_pictures import UNREADABLE
from penstock.gateway.batching.batch_report import EngineBatches, read_engine_batches
from penstock.gateway.batching.entries import Batch, Entry
from penstock.gateway.batching.merging import (
    MergedRequest,
    merge_requests,
    refused_requests,
    refused_rows,
    split_outputs,
)
from penstock.gateway.tracing import EngineSpan, Trace
from penstock.protocol.call import HttpCall
from penstock.protocol.engine import Engine, Relay
from penstock.protocol.errors import DeadlineExceeded, EngineFailed, InferenceError, InvalidRequest
from penstock.protocol.inference import BatchTrace, InferRequest, InferResponse, Timings
from penstock.protocol.shared_memory import Slab

RETRIES_A_DOUBLING = 4
# Triton drops a request that waits longer in its queue, if config.pbtxt allows it (see engines/triton/client.py).
QUEUE_TIMEOUT = "timeout"
# The call continues after the last deadline, because its duration improves the fit.
OVERDUE_S = 1.0
OVERDUE_TIMES = 10.0  # or that many times the expected time


@dataclass(slots=True, eq=False, kw_only=True)
class BatchMember(Entry):
    """A request in the queue or a batch.

    answer: cancelled if the client left. leads: its trace has the call's spans.
    """

    request: InferRequest
    answer: "asyncio.Future[InferResponse]"
    call: "EngineCall | None" = None
    trace: Trace | None = None
    leads: bool = False


@dataclass(frozen=True, slots=True)
class BatchEngine:
    """The engine of a model's batches. slots: concurrent calls. slab: memory shared with the engine.

    reads_slab, is_queued_again: see BatchOptions.
    """

    backend: Engine
    slots: int
    slab: Slab | None = None
    reads_slab: bool = False
    is_queued_again: bool = False


class EngineCall:
    """A batch at the engine: `ask`, then `deliver` the response or `settle` the error.

    A member fails alone when its deadline passes. After the last deadline the call holds its slot until it ends or is
    overdue, because the engine still runs it. If all members leave, the call is abandoned at once.
    """

    __slots__ = ("_abandon", "_engine", "_late", "_merged", "_retries", "batch", "is_overdue", "members")

    def __init__(self, batch: Batch, engine: BatchEngine, abandon: Callable[["EngineCall"], None]) -> None:
        """abandon: called when no member waits any longer. Every entry of the batch is a BatchMember."""
        self.batch = batch
        self.members = [entry for entry in batch.entries if isinstance(entry, BatchMember)]
        self._engine = engine
        self._abandon = abandon
        self._late: asyncio.TimerHandle | None = None
        self._merged: MergedRequest | None = None
        self.is_overdue = False
        self._retries = RETRIES_A_DOUBLING * (len(self.members) - 1).bit_length()
        for member in self.members:
            member.call = self
        self._watch_deadlines(batch.formed_at)

    async def ask(self, members: Sequence[BatchMember] | None = None) -> tuple[MergedRequest, InferResponse]:
        """The engine's response for the members' rows. Raises the engine's error."""
        members_sent, engine = self.members if members is None else members, self._engine
        try:
            return await self._ask(members_sent)
        except EngineFailed as error:
            if engine.slab is None or not engine.reads_slab or UNREADABLE not in error.message:
                raise
            engine.slab.unpublish()
        return await self._ask(members_sent)

    async def _ask(self, members_sent: Sequence[BatchMember]) -> tuple[MergedRequest, InferResponse]:
        engine = self._engine
        requests = [member.request for member in members_sent]
        merged = merge_requests(requests, engine.slab, reads_slab=engine.reads_slab)
        self._merged = merged
        request = merged.request
        if engine.is_queued_again and (left_us := _left_us(members_sent, time.monotonic())) is not None:
            request = replace(request, parameters={**request.parameters, QUEUE_TIMEOUT: left_us})
        span = _span_of_first(members_sent)
        request = request if span is None else replace(request, metadata=span.headers)
        is_answered = False
        try:
            response = await engine.backend.infer(request)
            is_answered = True
        finally:
            merged.release(is_answered=is_answered)
            if span is not None:
                span.end(is_error=not is_answered)
        return merged, response

    def deliver(
        self, merged: MergedRequest, response: InferResponse, members: Sequence[BatchMember] | None = None
    ) -> None:
        """Gives each member its rows, or an error to all if the number of rows is wrong."""
        answered = self.members if members is None else members
        try:
            parts = [response.outputs] if len(answered) == 1 else split_outputs(response, merged)
        except EngineFailed as error:
            self.fail(error, answered)
            return
        now = time.monotonic()
        epoch = time.time() - now
        for member, outputs in zip(answered, parts, strict=True):
            if member.answer.done():
                continue
            explanation = self._explanation(member, epoch, now)
            timings = Timings(queue=explanation.queued_s, infer=explanation.engine_s, batch_size=self.batch.rows)
            name, version = response.model_name, response.model_version
            own_id = member.request.id
            answer = InferResponse(name, version, outputs, own_id, response.parameters, timings, explanation)
            member.answer.set_result(answer)

    def fail(self, error: InferenceError, members: Sequence[BatchMember] | None = None) -> None:
        """Fails every waiting member, each with a copy of the error."""
        for member in self.members if members is None else members:
            if not member.answer.done():
                member.answer.set_exception(copy.copy(error))

    def left(self) -> None:
        """Call when a member was cancelled."""
        if all(member.answer.cancelled() for member in self.members):
            self._abandon(self)
        elif all(member.answer.done() for member in self.members):
            self._watch_deadlines(time.monotonic())

    def close(self) -> None:
        """Cancels the timer and breaks reference cycles, which would hold the tensors until garbage collection."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._merged = None
        for member in self.members:
            member.call = None

    async def settle(self, error: InferenceError, members: Sequence[BatchMember]) -> bool:
        """Ends a failed call of these members. Returns whether any was answered after all.

        Fails the requests whose rows the error names, else retries in halves, so that an invalid request fails alone.
        """
        waiting = [member for member in members if not member.answer.done()]
        if (len(waiting) < 2 and len(members) < 2) or not isinstance(error, InvalidRequest | EngineFailed):
            self.fail(error, waiting)
            return False
        named = self._refuse_named(error, members)
        if named:
            waiting = [member for member in waiting if not member.answer.done()]
        middle = 0 if named else (len(waiting) + 1) // 2
        answered = [await self._ask_again(error, part) for part in (waiting[:middle], waiting[middle:]) if part]
        return named or any(answered)

    def _refuse_named(self, error: InferenceError, members: Sequence[BatchMember]) -> bool:
        """Fails the members whose rows the error names. Returns whether there are any."""
        merged = self._merged
        if merged is None or len(merged.row_counts) != len(members):
            return False
        reasons = refused_rows(error.message, merged.rows, merged.request.model_name)
        refused = refused_requests(reasons, merged.order, merged.row_counts)
        for index, sentence in refused.items():
            self.fail(type(error)(sentence), members[index : index + 1])
        return bool(refused)

    async def _ask_again(self, error: InferenceError, members: Sequence[BatchMember]) -> bool:
        if not self._retries:
            self.fail(error, members)
            return False
        self._retries -= 1
        try:
            merged, response = await self.ask(members)
        except InferenceError as own_error:
            return await self.settle(own_error, members)
        self.deliver(merged, response, members)
        return True

    def _watch_deadlines(self, now: float) -> None:
        """Sets a timer for the next deadline; after the last one, for when the call is overdue."""
        if self._late is not None:
            self._late.cancel()
        waiting = [
            member.deadline for member in self.members if member.deadline is not None and not member.answer.done()
        ]
        self._late = None
        loop = asyncio.get_running_loop()
        if waiting:
            self._late = loop.call_later(max(min(waiting) - now, 0.0), self._end_late)
        elif all(member.answer.done() for member in self.members):
            max_wait_s = max(OVERDUE_S, OVERDUE_TIMES * (self.batch.expected_s or 0.0))
            self._late = loop.call_later(max_wait_s, self._give_up)

    def _give_up(self) -> None:
        self._late = None
        self.is_overdue = True
        self._abandon(self)

    def _end_late(self) -> None:
        now = time.monotonic()
        for member in self.members:
            if member.deadline is not None and member.deadline <= now and not member.answer.done():
                ran_s, rows = now - self.batch.formed_at, self.batch.rows
                member.answer.set_exception(
                    DeadlineExceeded(
                        f"the deadline passed while a batch of {rows} row{'s' * (rows > 1)} ran in the engine "
                        f"({ran_s:.3f} s so far); allow more time"
                    )
                )
        self._late = None
        self._watch_deadlines(now)

    def _explanation(self, member: BatchMember, epoch: float, now: float) -> BatchTrace:
        batch = self.batch
        formed_at, expected_s = batch.formed_at, batch.expected_s
        slack_s = None
        if expected_s is not None and member.deadline is not None:
            slack_s = member.deadline - formed_at - expected_s
        return BatchTrace(
            model_name=member.request.model_name,
            arrived_unix_s=epoch + member.arrived_at,
            queued_s=formed_at - member.arrived_at,
            engine_s=now - formed_at,
            batch_number=batch.number,
            requests=len(self.members),
            rows=batch.rows,
            close_reason=batch.close_reason,
            ahead=member.ahead,
            slots=self._engine.slots,
            busy=batch.busy,
            fit=batch.fit,
            expected_s=expected_s,
            slack_s=slack_s,
        )


def _span_of_first(members: Sequence[BatchMember]) -> EngineSpan | None:
    """The call's span, in the trace of the first member that has one."""
    for member in members:
        if member.trace is not None:
            if not member.leads:
                member.trace.stages((("queue", time.monotonic() - member.arrived_at),))
                member.leads = True
            return member.trace.engine("engine")
    return None


def _left_us(members: Sequence[BatchMember], now: float) -> int | None:
    """Microseconds until the last deadline, 1 or more; None if a member has none."""
    deadlines = [member.deadline for member in members if member.deadline is not None]
    return max(1, int((max(deadlines) - now) * 1e6)) if len(deadlines) == len(members) else None


STATISTICS_TIMEOUT_S = 5.0


async def fetch_engine_batches(relay: Relay, model_name: str) -> EngineBatches:
    """Triton's batch statistics of the model. Raises EngineFailed, and the relay's errors."""
    target = f"/v2/models/{quote(model_name, safe='')}/stats".encode()
    answer = await relay.send(HttpCall("GET", target, (), b""), deadline=time.monotonic() + STATISTICS_TIMEOUT_S)
    if answer.status != 200:
        reasons = answer.body[:200].decode(errors="replace")
        raise EngineFailed(f"the engine's statistics of model {model_name!r}: status {answer.status}: {reasons}")
    return read_engine_batches(answer.body)
