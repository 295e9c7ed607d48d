"""ModelStreamInfer: relays a client's stream over the engine's streams, and inspects every message."""

import asyncio
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

import grpc

from penstock.engines.relayed_calls import with_engine_sequence
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.grpc.interceptors import caller_of, metadata_of
from penstock.gateway.grpc.relay import (
    NO_MORE_REQUESTS,
    ClientStream,
    Context,
    StreamServer,
    deadline_of,
    encoded_call,
    parameter_deadline,
)
from penstock.gateway.grpc.status_codes import CallStatus, code_of, refusal_of, status_of
from penstock.gateway.grpc.stream_ledger import (
    EMPTY_FINAL_ON,
    Rejected,
    Sent,
    StreamAnswer,
    StreamLedger,
    error_answer,
    read_address,
    read_stream_answer,
    wants_empty_final,
)
from penstock.gateway.metrics import Metrics
from penstock.logs import get_logger
from penstock.protocol.call import GrpcCall, GrpcMetadata, InferHead
from penstock.protocol.engine import GrpcStream
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    Overloaded,
    error_for_client,
)
from penstock.protocol.grpc_codec import read_head

PROTOCOL = "grpc-stream"
ERRORS_AS_STATUS = ("triton_grpc_error", "true")  # metadata: the first error of a model ends the stream with a status

log = get_logger("grpc")


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """window: unanswered requests of one stream; further ones wait in the client.

    max_streams: open at once, of all clients. reader_timeout_s: for a client to read a response. engine_timeout_s: for
    the engine's next response on a stream with requests in flight.
    """

    window: int = 256
    max_streams: int = 4096
    reader_timeout_s: float = 30.0
    engine_timeout_s: float = 600.0


class StreamRelay(StreamServer):
    """Relays streams to the engine, up to a limit of open ones."""

    def __init__(self, plane: DataPlane, record: Metrics, limits: StreamLimits | None = None) -> None:
        super().__init__()
        self._plane = plane
        self._record = record
        self._limits = limits or StreamLimits()

    def _opened(self, method: str, context: Context) -> ClientStream:
        limit = self._limits.max_streams
        if len(self._open) >= self._limits.max_streams:
            raise Overloaded(f"{len(self._open)} streams are open (limit {limit}); close one, or send by ModelInfer")
        return _Session(self._plane, self._record, self._limits, method, context)

    def _refusal(self, error: InferenceError) -> CallStatus:
        return refusal_of(self._record, error)


class _StreamEnd(Exception):
    """Ends the stream with this status."""

    def __init__(self, status: CallStatus) -> None:
        super().__init__(status.details)
        self.status = status


_Key = tuple[bool, str]  # whether it is for decoupled models; the model's name if it has its own engine process


@dataclass(slots=True)
class _Upstream:
    """One of the engine's streams. pending: unanswered requests on it. silence: time-out of the next response."""

    engine: GrpcStream
    pending: int = 0
    silence: asyncio.Timeout | None = None


_FAILURES: dict[grpc.StatusCode, type[InferenceError]] = {
    grpc.StatusCode.UNAVAILABLE: EngineUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


class _Session(ClientStream):
    """A client's stream over two of the engine's: one for decoupled models, one for the others.

    A model with its own engine process has separate streams. Triton 2.51 accepts both kinds on one stream, but crashes
    (SIGABRT) or hangs when both answer at a time.
    """

    def __init__(self, plane: DataPlane, record: Metrics, limits: StreamLimits, method: str, context: Context) -> None:
        self._plane = plane
        self._record = record
        self._limits = limits
        self._method = method
        super().__init__(context)
        self._caller = caller_of(context)
        self._metadata = metadata_of(context)
        self._has_errors_as_status = ERRORS_AS_STATUS in self._metadata
        self._ledger = StreamLedger(limits.window)
        self._room = asyncio.Event()
        self._writing = asyncio.Lock()
        self._sides: dict[_Key, _Upstream] = {}
        self._tasks = asyncio.TaskGroup()
        self._trailing: GrpcMetadata = ()
        self._is_half_closed = False
        self._is_admitting = False
        self._has_client_left = False

    async def run(self) -> CallStatus:
        """Runs until one side ends it; returns the status."""
        status = CallStatus(grpc.StatusCode.CANCELLED, "")
        try:
            status = await self._outcome()
        except asyncio.CancelledError:
            self._has_client_left = True
            raise
        finally:
            self._is_over = True
            if self._has_client_left and (len(self._ledger) or self._is_admitting):
                self._record.cancelled(PROTOCOL)
            self._abandon(status.code)
        return status

    async def _outcome(self) -> CallStatus:
        try:
            async with self._whole:
                await self._relayed()
        except TimeoutError:
            return refusal_of(
                self._record, EngineUnavailable("this gateway stopped before all answers came; send to another one")
            )
        except InferenceError as error:
            return refusal_of(self._record, error)
        except _StreamEnd as end:
            return end.status
        except Exception as error:  # the task's root: a bug is logged, and the client gets no details
            log.exception("a gRPC stream failed unexpectedly")
            return status_of(error_for_client(error))
        return CallStatus(grpc.StatusCode.OK, "", self._trailing)

    async def _relayed(self) -> None:
        """Relays in both directions until the engine has answered all requests, or one direction fails."""
        try:
            async with self._tasks:
                await self._context.send_initial_metadata(())  # at once, as in Triton: clients may wait for it
                await self._pump_up()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        if self._is_cut_short:
            raise EngineUnavailable(NO_MORE_REQUESTS)

    async def _side(self, key: _Key) -> _Upstream:
        """The engine's stream for such models, opened by the first request, so that unused streams cost little."""
        side = self._sides.get(key)
        if side is None:
            opened: asyncio.Future[GrpcStream] = asyncio.get_running_loop().create_future()
            self._tasks.create_task(self._serve(opened, key))
            await opened
            side = self._sides[key]
        return side

    async def _serve(self, opened: "asyncio.Future[GrpcStream]", key: _Key) -> None:
        """Opens one engine stream and relays its responses until it ends."""
        async with self._plane.open_stream(
            self._method, self._metadata, caller=self._caller, deadline=deadline_of(self._context)
        ) as engine:
            side = self._sides[key] = _Upstream(engine)
            if not opened.done():  # otherwise its waiter was cancelled, as this soon will be
                opened.set_result(engine)
            await self._pump_down(side)
            answer = await engine.end()
        if answer.code != 0 or not self._is_half_closed:
            raise _StreamEnd(CallStatus(code_of(answer), answer.details, answer.trailing_metadata))
        self._trailing += answer.trailing_metadata

    # The client's requests

    async def _pump_up(self) -> None:
        while (message := await self._next_message(self._wait_for_room)) is not None:
            await self._take(message)
        self._is_half_closed = True
        for side in self._sides.values():
            await side.engine.half_close()

    async def _wait_for_room(self) -> None:
        while not self._ledger.has_room:
            self._room.clear()
            await self._room.wait()

    async def _take(self, message: bytes) -> None:
        started = time.monotonic()
        self._is_admitting = True
        try:
            head = read_head(message)
            until = parameter_deadline(head, started)
            if head.classification_outputs:
                await self._plane.refuse_classification_of_bytes(head)
            sent, message = await self._admitted(head, message, until, started)
        except InferenceError as error:
            address = read_address(message)
            self._ledger.refuse(Rejected(address.model_name, address.request_id, started, error))
            self._is_admitting = False
            await self._tell_due()
            return
        self._ledger.send(sent)
        self._is_admitting = False
        side = await self._side((sent.is_decoupled, head.model_name if self._plane.is_apart(head.model_name) else ""))
        side.pending += 1
        if side.silence is not None and side.silence.when() is None:
            side.silence.reschedule(asyncio.get_running_loop().time() + self._limits.engine_timeout_s)
        call = await with_engine_sequence(GrpcCall(self._method, message), head, self._caller)
        await side.engine.send(cast(GrpcCall, call).message)

    async def _admitted(
        self, head: InferHead, message: bytes, until: float | None, started: float
    ) -> tuple[Sent, bytes]:
        """The request with its slot, and the message for the engine."""
        image = self._plane.image_input(head.model_name) if head.bytes_inputs else None
        asked = encoded_call(head, GrpcCall(self._method, message), image) if image is not None else None
        size_bytes = len(message) if asked is None else asked.size_bytes
        is_decoupled = self._plane.is_decoupled(head.model_name)
        if is_decoupled is None:
            is_decoupled = await self._plane.find_decoupled(head.model_name)
        hides_final = is_decoupled and not wants_empty_final(message)
        with ExitStack() as place:
            place.enter_context(self._plane.stream_slot(head, self._caller, size_bytes))
            if asked is not None:
                message = cast(GrpcCall, await self._plane.with_tensors(asked, until, self._caller)).message
            place.enter_context(await self._plane.slots.place(head.model_name, self._caller.client, until))
            kept = place.pop_all()
        sent = Sent(head.model_name, head.request_id, started, partial(_leave, kept), is_decoupled, hides_final)
        return sent, message + EMPTY_FINAL_ON if hides_final else message

    async def _pump_down(self, side: _Upstream) -> None:
        while (message := await self._receive(side)) is not None:
            answer = read_stream_answer(message)
            if answer.error and answer.model_name and self._has_errors_as_status:
                self._settle(answer, side)
                raise _StreamEnd(CallStatus(grpc.StatusCode.INTERNAL, answer.error))
            if not (answer.is_empty_final and self._hides(answer)):
                await self._write(message)
            self._settle(answer, side)
            await self._tell_due()

    async def _receive(self, side: _Upstream) -> bytes | None:
        max_wait_s = self._limits.engine_timeout_s
        try:
            async with asyncio.timeout(max_wait_s if side.pending else None) as side.silence:
                return await side.engine.receive()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine said nothing for {max_wait_s:g} s while {side.pending} requests were on the stream"
            ) from None
        finally:
            side.silence = None

    def _hides(self, answer: StreamAnswer) -> bool:
        request = self._ledger.find(answer)
        return request is not None and request.hides_empty_final

    def _settle(self, answer: StreamAnswer, side: _Upstream) -> None:
        """Counts the response, and releases the request's slot after the last one."""
        request = self._ledger.answered(answer)
        if request is None or not answer.is_last:
            return
        side.pending -= 1
        request.leave(None)
        if not request.has_failed:
            self._plane.stream_answered(request.model_name, time.monotonic() - request.started)
        # The engine sends only the message of a request's error on a stream.
        code = grpc.StatusCode.UNKNOWN if request.has_failed else grpc.StatusCode.OK
        self._count(request.model_name, code, request.started)

    async def _tell_due(self) -> None:
        """Writes the rejections that are due, and admits the next request."""
        for rejected in self._ledger.due():
            status = refusal_of(self._record, rejected.error)
            self._count(rejected.model_name, status.code, rejected.started)
            if self._has_errors_as_status:
                raise _StreamEnd(status)
            await self._write(error_answer(rejected.request_id, rejected.error.message))
        if self._ledger.has_room:
            self._room.set()

    async def _write(self, message: bytes) -> None:
        """Raises DeadlineExceeded if the client does not read."""
        max_wait_s = self._limits.reader_timeout_s
        self._plane.admission.hold(len(message))
        try:
            async with self._writing, asyncio.timeout(max_wait_s):
                await self._context.write(message)
        except TimeoutError:
            reason = f"an answer waited {max_wait_s:g} s for its reader; read the answers as they come"
            raise DeadlineExceeded(reason) from None
        except grpc.aio.InternalError:
            self._has_client_left = True
            raise _StreamEnd(CallStatus(grpc.StatusCode.CANCELLED, "the client left while it was answered")) from None
        finally:
            self._plane.admission.release(len(message))

    def _abandon(self, code: grpc.StatusCode) -> None:
        """Releases the slots of unanswered requests."""
        shown = grpc.StatusCode.UNKNOWN if code is grpc.StatusCode.OK else code
        for request in self._ledger.abandon():
            request.leave(_end_of(code))
            if code is not grpc.StatusCode.CANCELLED:
                self._count(request.model_name, shown, request.started)

    def _count(self, model_name: str, code: grpc.StatusCode, started: float) -> None:
        label, seconds = self._plane.model_label(model_name), time.monotonic() - started
        self._record.request_done(model=label, protocol=PROTOCOL, code=code.name, seconds=seconds)


def _leave(place: ExitStack, end: BaseException | None) -> None:
    """Releases a slot. end: raised inside it if the engine may still work on the request, else None."""
    if end is None:
        place.close()
        return
    with suppress(type(end)), place:
        raise end


def _end_of(code: grpc.StatusCode) -> BaseException:
    """The error of an unanswered request whose stream ended with this code."""
    if code is grpc.StatusCode.CANCELLED:
        return asyncio.CancelledError()
    kind = _FAILURES.get(code, EngineFailed)
    return kind(f"the stream ended ({code.name}) before the request was answered")


def _first(error: BaseException) -> BaseException:
    """The first error of a group; the others follow from it."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
