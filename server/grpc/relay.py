"""The way of one gRPC call through the data plane: bytes in, bytes out, every failure a status."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from server.core.encoded_images import EncodedCall
from server.core.errors import BackendUnavailable, DeadlineExceeded, InferenceError
from server.core.relay import GrpcAnswer, GrpcCall, InferHead
from server.dataplane import DataPlane, Verb
from server.grpc.codec import scan_infer
from server.grpc.encoded_images import encoded_call
from server.grpc.errors import Status, code_of, status_of
from server.grpc.gate import caller_of, metadata_of
from server.grpc.handover import WATCHED_FROM_BYTES, watch_reader
from server.grpc.recorder import CallRecorder
from server.logs import get_logger

PROTOCOL = "grpc"
MAX_DEADLINE_S = 24 * 3600.0
DEADLINE_SLACK_S = 0.02

log = get_logger("grpc")

Context = grpc.aio.ServicerContext[bytes, bytes]
Work = Callable[[], Awaitable[GrpcAnswer]]


@dataclass(slots=True)
class Outcome:
    """How a call ended, as its caller sees it."""

    status: Status
    message: bytes = b""


class CallRelay:
    """Passes calls to the data plane. Every call that it began is cut by `cut`, which the end of a drain calls."""

    def __init__(self, plane: DataPlane, record: CallRecorder, *, reader_patience_s: float) -> None:
        """reader_patience_s: how long a client may leave an answer untaken, and more for a large one."""
        self._plane = plane
        self._record = record
        self._reader_patience_s = reader_patience_s
        self._running: set[asyncio.Task[object]] = set()
        self._cut: set[asyncio.Task[object]] = set()

    async def infer(self, method: str, message: bytes, context: Context) -> bytes:
        """The engine's ModelInferResponse; counted, whatever becomes of it."""
        started = time.monotonic()
        head, deadline = InferHead(""), None

        async def work() -> GrpcAnswer:
            nonlocal head, deadline
            scan = scan_infer(message)
            head = scan.head
            deadline = _earlier(deadline_of(context), parameter_deadline(head, started))
            if scan.classified_outputs:
                await self._plane.refuse_classification_of_bytes(head, scan.classified_outputs)
            call, caller = _call(method, message, context), caller_of(context)
            asked = self._with_images(head, call) if head.bytes_inputs else None
            if asked is not None:
                return await self._plane.relay_grpc_images(asked, caller=caller, deadline=deadline)
            return await self._plane.relay_grpc(Verb.INFER, head, call, caller=caller, deadline=deadline)

        try:
            outcome = await self._outcome(work)
        except asyncio.CancelledError:
            if deadline is None or time.monotonic() < deadline - DEADLINE_SLACK_S:
                self._record.cancelled(PROTOCOL)
            else:  # the client gave up at its own deadline, a moment before we could say so
                self._count(head, grpc.StatusCode.DEADLINE_EXCEEDED, started)
            raise
        self._count(head, outcome.status.code, started)
        if len(outcome.message) >= WATCHED_FROM_BYTES:
            kept_bytes = len(message) + len(outcome.message)
            watch_reader(self._plane.admission, kept_bytes, self._reader_patience_s, self._note_slow_reader)
        return await _end(outcome, context)

    async def pass_on(
        self, verb: Verb, method: str, message: bytes, model_of: Callable[[bytes], str], context: Context
    ) -> bytes:
        """The engine's answer to a call that is no inference. model_of: reads the model's name off the message."""

        async def work() -> GrpcAnswer:
            head = InferHead(model_of(message))
            return await self._plane.relay_grpc(
                verb, head, _call(method, message, context), caller=caller_of(context), deadline=deadline_of(context)
            )

        return await self.answer(work, context)

    async def answer(self, work: Work, context: Context) -> bytes:
        """What the work gives, or its failure as the call's end."""
        return await _end(await self._outcome(work), context)

    def _with_images(self, head: InferHead, call: GrpcCall) -> EncodedCall[GrpcCall] | None:
        place = self._plane.image_input(head.model_name)
        return encoded_call(head, call, place) if place is not None else None

    def cut(self) -> None:
        """End every running call now, as UNAVAILABLE."""
        for task in self._running - self._cut:
            self._cut.add(task)
            task.cancel()

    def _note_slow_reader(self) -> None:
        self._record.rejected("slow_reader")

    def _count(self, head: InferHead, code: grpc.StatusCode, started: float) -> None:
        self._record.request_done(
            model=self._plane.model_label(head.model_name),
            protocol=PROTOCOL,
            code=code.name,
            seconds=time.monotonic() - started,
        )

    async def _outcome(self, work: Work) -> Outcome:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("calls are served by tasks")
        self._running.add(task)
        try:
            answer = await work()
        except asyncio.CancelledError:
            if task not in self._cut or task.uncancel() > 0:  # somebody else cancelled it, too
                raise
            error = BackendUnavailable("this gateway stopped before the answer came; send to another one")
            return Outcome(self._refusal(error))
        except InferenceError as error:
            return Outcome(self._refusal(error))
        except Exception:  # a bug of ours: the task's root, where it is logged and the client learns no more
            log.exception("a gRPC call failed unexpectedly")
            return Outcome(Status(grpc.StatusCode.INTERNAL, "internal error"))
        finally:
            self._running.discard(task)
            self._cut.discard(task)
        return Outcome(Status(code_of(answer), answer.details, answer.trailing_metadata), answer.message)

    def _refusal(self, error: InferenceError) -> Status:
        self._record.rejected(error.reason)
        log.debug("request refused", reason=error.reason, error=error.message)
        return status_of(error)


async def _end(outcome: Outcome, context: Context) -> bytes:
    """The answer's message, or the end of the call with its status."""
    code, details, trailing = outcome.status
    if code is not grpc.StatusCode.OK:
        await context.abort(code, details, trailing)
    if trailing:
        context.set_trailing_metadata(trailing)
    return outcome.message


def _call(method: str, message: bytes, context: Context) -> GrpcCall:
    return GrpcCall(method, message, metadata_of(context))


def deadline_of(context: Context) -> float | None:
    """The client's gRPC deadline as monotonic seconds; None for none, and for one more than a day away."""
    remaining_s = context.time_remaining()
    if remaining_s is None or remaining_s > MAX_DEADLINE_S:
        return None
    if remaining_s <= 0:
        raise DeadlineExceeded("the deadline had passed when the request arrived; allow more time")
    return time.monotonic() + remaining_s


def parameter_deadline(head: InferHead, started: float) -> float | None:
    """The v2 parameter `timeout`, microseconds from the request's arrival; 0 stands for none."""
    if not head.timeout_us:
        return None
    if head.timeout_us < 0:
        raise DeadlineExceeded(f"the parameter timeout is {head.timeout_us} µs; it counts from the request's arrival")
    return started + head.timeout_us / 1e6 if head.timeout_us < MAX_DEADLINE_S * 1e6 else None


def _earlier(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
