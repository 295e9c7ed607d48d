"""One batch at the engine: its members' rows in one call, and each member's own end."""

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from server.batching.entry import Batch, Entry
from server.batching.merge import MergedRequest, merge_requests
from server.batching.named_rows import refused_requests, refused_rows
from server.batching.split import split_outputs
from server.core.backend import Backend
from server.core.batching import Explanation
from server.core.errors import BackendFailed, DeadlineExceeded, InferenceError, InvalidRequest
from server.core.infer import InferRequest, InferResponse, Timings
from server.core.slab import Slab
from server.tracing.trace import EngineSpan, Trace

RETRIES_A_DOUBLING = 4
# Beyond the last deadline a call is waited for: an engine that is late goes on, and that is to be known.
OVERDUE_S = 1.0
OVERDUE_TIMES = 10.0  # or so many times what was expected


@dataclass(slots=True, eq=False, kw_only=True)
class Member(Entry):
    """A request in the queue or in a batch. answer: set once; cancelled where nobody waits for it any longer.

    leads: its trace has the engine's call itself, and the engine's own spans under it; the other members of the batch
    are told afterwards how long it took.
    """

    request: InferRequest
    answer: "asyncio.Future[InferResponse]"
    call: "EngineCall | None" = None
    trace: Trace | None = None
    leads: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """Whom a model's batches are sent to. slots: calls that may run at once. slab: what the engine reads from."""

    backend: Backend
    slots: int
    slab: Slab | None = None


class EngineCall:
    """A batch that was formed. `ask` it, then `deliver` what came, or `settle` what failed.

    A deadline that passes meanwhile ends the member that has it, and no other. A call whose every deadline passed keeps
    its slot, since the engine goes on with it, until it ends or is overdue; then it is given up. One whose every member
    left is given up at once.
    """

    __slots__ = ("_abandon", "_asked", "_engine", "_late", "_retries", "batch", "is_overdue", "members")

    def __init__(self, batch: Batch, engine: Engine, abandon: Callable[["EngineCall"], None]) -> None:
        """abandon: told when no member waits any longer. Every entry of the batch is a Member."""
        self.batch = batch
        self.members = [entry for entry in batch.entries if isinstance(entry, Member)]
        self._engine = engine
        self._abandon = abandon
        self._late: asyncio.TimerHandle | None = None
        self._asked: MergedRequest | None = None
        self.is_overdue = False
        self._retries = RETRIES_A_DOUBLING * (len(self.members) - 1).bit_length()
        for member in self.members:
            member.call = self
        self._watch_deadlines(batch.formed_at)

    async def ask(self, members: Sequence[Member] | None = None) -> tuple[MergedRequest, InferResponse]:
        """The engine's answer to the members' rows. Raises what the engine raises."""
        asked = self.members if members is None else members
        merged = merge_requests([member.request for member in asked], self._engine.slab)
        self._asked = merged
        span = _span_of_first(asked)
        request = merged.request if span is None else replace(merged.request, metadata=span.headers)
        is_answered = False
        try:
            response = await self._engine.backend.infer(request)
            is_answered = True
        finally:
            merged.release(is_answered=is_answered)
            if span is not None:
                span.end(is_error=not is_answered)
        return merged, response

    def deliver(self, merged: MergedRequest, response: InferResponse, members: Sequence[Member] | None = None) -> None:
        """Each member's own rows; an error for all of them where the answer has other rows than were asked for."""
        answered = self.members if members is None else members
        try:
            parts = [response.outputs] if len(answered) == 1 else split_outputs(response, merged)
        except BackendFailed as error:
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

    async def settle(self, error: InferenceError) -> bool:
        """The end of a call that failed; whether any member was answered after all.

        What the engine says against a merged call is asked again in halves, one after the other, so that a request
        that no engine takes fails alone; where it names the rows that it refuses, these fail with what it says of them,
        and the others are asked again together. Further calls are few: what is undecided after them fails with the
        error of the part that it was in.
        """
        return await self._settle(error, self.members)

    def fail(self, error: InferenceError, members: Sequence[Member] | None = None) -> None:
        """The end of every member that still waits; each gets an error of its own to raise."""
        for member in self.members if members is None else members:
            if not member.answer.done():
                member.answer.set_exception(copy.copy(error))

    def left(self) -> None:
        """A member is not waited for any longer."""
        if all(member.answer.cancelled() for member in self.members):
            self._abandon(self)
        elif all(member.answer.done() for member in self.members):
            self._watch_deadlines(time.monotonic())

    def close(self) -> None:
        """It is over: no deadline is watched any longer, and its members are free of it and of one another.

        A batch whose members hold it is garbage that only a collection finds, with all of its tensors.
        """
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._asked = None
        for member in self.members:
            member.call = None

    async def _settle(self, error: InferenceError, members: Sequence[Member]) -> bool:
        waiting = [member for member in members if not member.answer.done()]
        if (len(waiting) < 2 and len(members) < 2) or not isinstance(error, InvalidRequest | BackendFailed):
            self.fail(error, waiting)
            return False
        named = self._refuse_named(error, members)
        if named:
            waiting = [member for member in waiting if not member.answer.done()]
        middle = 0 if named else (len(waiting) + 1) // 2
        answered = [await self._ask_again(error, part) for part in (waiting[:middle], waiting[middle:]) if part]
        return named or any(answered)

    def _refuse_named(self, error: InferenceError, members: Sequence[Member]) -> bool:
        """End those whose rows the error names, of the call that was just asked for them. Whether there are such."""
        merged = self._asked
        if merged is None or len(merged.row_counts) != len(members):
            return False
        said = refused_rows(error.message, merged.rows, merged.request.model_name)
        refused = refused_requests(said, merged.order, merged.row_counts)
        for index, sentence in refused.items():
            self.fail(type(error)(sentence), members[index : index + 1])
        return bool(refused)

    async def _ask_again(self, error: InferenceError, members: Sequence[Member]) -> bool:
        if not self._retries:
            self.fail(error, members)
            return False
        self._retries -= 1
        try:
            merged, response = await self.ask(members)
        except InferenceError as own_error:
            return await self._settle(own_error, members)
        self.deliver(merged, response, members)
        return True

    def _watch_deadlines(self, now: float) -> None:
        """The next deadline; after the last one, when the call is overdue."""
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
            patience_s = max(OVERDUE_S, OVERDUE_TIMES * (self.batch.expected_s or 0.0))
            self._late = loop.call_later(patience_s, self._give_up)

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

    def _explanation(self, member: Member, epoch: float, now: float) -> Explanation:
        batch = self.batch
        formed_at, expected_s = batch.formed_at, batch.expected_s
        slack_s = None
        if expected_s is not None and member.deadline is not None:
            slack_s = member.deadline - formed_at - expected_s
        return Explanation(
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


def _span_of_first(members: Sequence[Member]) -> EngineSpan | None:
    """The call, in the trace of the first member that has one."""
    for member in members:
        if member.trace is not None:
            if not member.leads:
                member.trace.stages((("queue", time.monotonic() - member.arrived_at),))
                member.leads = True
            return member.trace.engine("engine")
    return None
