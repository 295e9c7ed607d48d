"""Inferences of workers, which need no task each in the core, and of client processes, admitted like gRPC requests."""

import asyncio
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from penstock.gateway.metrics import Metrics, note_refused
from penstock.gateway.workers.connection import CancelledAt, Infer, Inferred, MessageConnection, ToCore, failed_message
from penstock.gateway.workers.slab_sharing import MAX_DEADLINE_S, SlabPartitions
from penstock.logs import get_logger
from penstock.protocol.engine import Engine
from penstock.protocol.errors import InferenceError, InvalidRequest, error_for_client
from penstock.protocol.inference import Datatype, InferRequest, InferResponse
from penstock.protocol.request_checks import check_counts, check_shape, checked_name

if TYPE_CHECKING:
    from penstock.gateway.batching.batcher import BatcherPool, ModelBatcher
    from penstock.gateway.batching.engine_call import BatchMember
    from penstock.gateway.dataplane import DataPlane

log = get_logger("core")


def enqueue_call(
    queues: "BatcherPool",
    slab_partitions: SlabPartitions | None,
    line: MessageConnection[ToCore],
    ask: Infer,
    kept: "dict[int, QueuedCall]",
) -> bool:
    """Queues the inference, and sends its answer or error. False without a queue for it. kept: unfinished calls."""
    with ReportFailures(line, ask.number):
        request = ask.request if slab_partitions is None else slab_partitions.in_full(ask.request, line)
        entered = queues.enter(request, client=ask.client, priority=ask.priority)
        if entered is None:
            return False
        kept[ask.number] = QueuedCall(line, ask.number, *entered, kept)
    return True


class ReportFailures:
    """Context manager that sends an exception as the answer. Not `contextmanager`, which costs five times as much."""

    __slots__ = ("_line", "_number")

    def __init__(self, line: MessageConnection[ToCore], number: int) -> None:
        self._line = line
        self._number = number

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if not isinstance(error, InferenceError):
            log.error("a worker's request failed unexpectedly", exc_info=error)
            error = error_for_client(error)
        self._line.send(failed_message(self._number, error))
        return True


class QueuedCall:
    """One queued inference of a worker. `cancel` works like a task's."""

    __slots__ = ("_batcher", "_kept", "_line", "_member", "_number")

    def __init__(
        self,
        line: MessageConnection[ToCore],
        number: int,
        batcher: "ModelBatcher",
        member: "BatchMember",
        kept: "dict[int, QueuedCall]",
    ) -> None:
        self._line, self._number, self._batcher, self._member, self._kept = line, number, batcher, member, kept
        member.answer.add_done_callback(self._send_answer)

    def cancel(self) -> None:
        """Cancels it, and sends the worker its stage."""
        if self._kept.pop(self._number, None) is not None:
            self._line.send(CancelledAt(self._number, self._batcher.leave(self._member)))

    def _send_answer(self, answer: "asyncio.Future[InferResponse]") -> None:
        if self._kept.pop(self._number, None) is None:
            return  # it was cancelled
        with ReportFailures(self._line, self._number):
            if answer.cancelled():
                raise InferenceError("internal error")
            self._line.send(Inferred(self._number, answer.result()))


PROTOCOL_LABEL = "guest"  # plain-english: ok (label value of the metrics, beside http and grpc)
DEADLINE_SLACK_S = 0.02
_DONE, _LATE, _BUG = "OK", "DEADLINE_EXCEEDED", "INTERNAL"


class ClientProcessCalls:
    """Runs the inferences of all client processes of a core."""

    def __init__(
        self,
        plane: "DataPlane",
        backend: Engine,
        record: Metrics,
        code_of: Callable[[InferenceError], str],
        slab_partitions: SlabPartitions | None = None,
    ) -> None:
        """backend: runs requests that are not batched. code_of: gRPC's name of an error."""
        self._plane = plane
        self._backend = backend
        self._record = record
        self._code_of = code_of
        self._slab_partitions = slab_partitions

    async def infer(self, ask: Infer, *, peer: Hashable, client: str) -> InferResponse:
        """The answer; always counted. Raises InferenceError. peer: owner of the part. client: for fairness."""
        started = time.monotonic()
        name, deadline = ask.request.model_name, ask.request.deadline
        try:
            request = self._taken(ask.request, peer, started)
            answer = await self._plane.infer_tensors(request, self._backend, client=client, priority=ask.priority)
        except asyncio.CancelledError:
            if deadline is None or time.monotonic() < deadline - DEADLINE_SLACK_S:
                self._record.cancelled(PROTOCOL_LABEL)
            else:  # the peer enforces the deadline itself, slightly earlier
                self._count(name, _LATE, started)
            raise
        except InferenceError as error:
            self._reject(name, error, started)
            raise
        except Exception:  # logged at the task's root; only counted here
            self._count(name, _BUG, started)
            raise
        if isinstance(answer, InferenceError):
            self._count(name, self._code_of(answer), started)
            raise answer
        self._count(name, _DONE, started)
        return answer

    def refused(self, ask: Infer, error: InferenceError) -> None:
        """Counts an inference that was rejected before `infer`."""
        self._reject(ask.request.model_name, error, time.monotonic())

    def _taken(self, request: InferRequest, peer: Hashable, now: float) -> InferRequest:
        """The validated request with all its bytes. Raises InferenceError."""
        _check_request(request)
        deadline = request.deadline
        if deadline is not None:
            if math.isnan(deadline):
                raise InvalidRequest("the deadline is not a number")
            deadline = deadline if deadline - now <= MAX_DEADLINE_S else None
        if request.metadata or deadline != request.deadline:
            request = replace(request, metadata=(), deadline=deadline)
        return request if self._slab_partitions is None else self._slab_partitions.in_full(request, peer)

    def _reject(self, model_name: str, error: InferenceError, started: float) -> None:
        note_refused(self._record, log, error, "request of a client process refused")
        self._count(model_name, self._code_of(error), started)

    def _count(self, model_name: str, code: str, started: float) -> None:
        self._record.request_done(
            model=self._plane.model_label(model_name),
            protocol=PROTOCOL_LABEL,
            code=code,
            seconds=time.monotonic() - started,
        )


def _check_request(request: InferRequest) -> None:
    """Raises InvalidRequest for requests that other transports reject, too: they could crash or block the engine."""
    checked_name(request.model_name)
    check_counts(len(request.inputs), request.outputs)
    for tensor in request.inputs:
        check_shape(tensor.name, tensor.shape)
        if tensor.place is not None and tensor.datatype is Datatype.BYTES:
            raise InvalidRequest(f"tensor {tensor.name!r} is BYTES: send its bytes instead of an address")
