"""Relays a unary gRPC call through the data plane: bytes in, bytes out, every failure a status."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from penstock.engines.call_options import CuttableCalls
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.grpc.aio_server import ABANDONED
from penstock.gateway.grpc.interceptors import caller_of, metadata_of
from penstock.gateway.grpc.status_codes import CallStatus, code_of, refusal_of, status_of
from penstock.gateway.in_flight import InFlightLimiter
from penstock.gateway.metrics import Metrics
from penstock.logs import get_logger
from penstock.protocol.call import GrpcAnswer, GrpcCall, InferHead
from penstock.protocol.errors import DeadlineExceeded, InferenceError, InvalidRequest, error_for_client
from penstock.protocol.grpc_codec import read_head
from penstock.protocol.grpc_messages import with_raw_inputs
from penstock.protocol.identity import Verb
from penstock.protocol.inference import Tensor
from penstock.protocol.request_checks import EncodedCall, ImageInput, check_images, images_in, refuse_shared_images

WATCHED_FROM_BYTES = 16 << 10
LEAST_BYTES_PER_S = 256 << 10


def limit_read_time(
    admission: InFlightLimiter, size_bytes: int, max_wait_s: float, given_up: Callable[[], None]
) -> None:
    """Ends the call as CANCELLED, and calls given_up, if its client does not read the response in time.

    Call it in the call's task right before the response. size_bytes: of response and request, in flight until it is
    read. max_wait_s: and a second more for each LEAST_BYTES_PER_S.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("calls are served by tasks")

    def give_up() -> None:
        given_up()
        task.cancel(ABANDONED)

    timer = asyncio.get_running_loop().call_later(max_wait_s + size_bytes / LEAST_BYTES_PER_S, give_up)

    def taken(_: object) -> None:
        timer.cancel()
        admission.release(size_bytes)

    admission.hold(size_bytes)
    task.add_done_callback(taken)


def encoded_call(head: InferHead, call: GrpcCall, place: ImageInput) -> EncodedCall[GrpcAnswer] | None:
    """The call with its encoded images for this input, or None. Raises InvalidRequest for invalid images."""
    if head.bytes_inputs != (place.name,):
        return None
    try:
        request = service_pb2.ModelInferRequest.FromString(call.message)
    except DecodeError as error:
        raise InvalidRequest("the request is not a ModelInferRequest") from error
    if len(request.inputs) != 1 or len(request.raw_input_contents) > 1:
        return None  # the engine reports these
    images = _images(request)
    return EncodedCall(
        head, images, lambda tensors: replace(call, message=_with_tensors(request, tensors)), place.row_bytes
    )


def _images(request: service_pb2.ModelInferRequest) -> tuple[bytes, ...]:
    entry = request.inputs[0]
    shape = tuple(entry.shape)
    if "shared_memory_region" in entry.parameters:
        refuse_shared_images(entry.name)
    if request.raw_input_contents:
        return images_in(entry.name, shape, memoryview(request.raw_input_contents[0]))
    images = tuple(entry.contents.bytes_contents)
    check_images(entry.name, shape, len(images))
    return images


def _with_tensors(request: service_pb2.ModelInferRequest, tensors: Sequence[Tensor]) -> bytes:
    """The request with the first tensor instead of its images, and further inputs; all other fields are unchanged."""
    tensor, *others = tensors
    entry = request.inputs[0]
    entry.datatype = tensor.datatype.value
    entry.shape[:] = tensor.shape
    entry.ClearField("contents")
    request.ClearField("raw_input_contents")
    for other in others:
        request.inputs.add(name=other.name, datatype=other.datatype.value, shape=other.shape)
    return with_raw_inputs(request, tensors)


PROTOCOL = "grpc"
MAX_DEADLINE_S = 24 * 3600.0
DEADLINE_SLACK_S = 0.02

log = get_logger("grpc")

Context = grpc.aio.ServicerContext[bytes, bytes]
Work = Callable[[], Awaitable[GrpcAnswer]]


@dataclass(slots=True)
class CallOutcome:
    """How a call ended for its client."""

    status: CallStatus
    message: bytes = b""


class CallRelay:
    """Relays calls to the data plane. `cut` ends all running calls, at the end of a drain."""

    def __init__(self, plane: DataPlane, record: Metrics, *, reader_timeout_s: float, is_counting: bool = True) -> None:
        """reader_timeout_s: time for a client to read a response, and more for a large one.

        is_counting: whether it counts inferences. In a core it is False: the workers count them.
        """
        self._is_counting = is_counting
        self._plane = plane
        self._record = record
        self._reader_timeout_s = reader_timeout_s
        self._running = CuttableCalls()

    async def infer(self, method: str, message: bytes, context: Context) -> bytes:
        """The engine's ModelInferResponse; always counted."""
        started = time.monotonic()
        head, deadline = InferHead(""), None

        async def work() -> GrpcAnswer:
            nonlocal head, deadline
            head = read_head(message)
            deadline = _earlier(deadline_of(context), parameter_deadline(head, started))
            call, caller = _call(method, message, context), caller_of(context)
            asked = self._with_images(head, call) if head.bytes_inputs else None
            return await self._plane.relay(Verb.INFER, head, asked or call, caller=caller, deadline=deadline)

        try:
            outcome = await self._outcome(work)
        except asyncio.CancelledError:
            if deadline is None or time.monotonic() < deadline - DEADLINE_SLACK_S:
                if self._is_counting:
                    self._record.cancelled(PROTOCOL)
            else:  # the client gave up at its own deadline, just before our response
                self._count(head, grpc.StatusCode.DEADLINE_EXCEEDED, started)
            raise
        self._count(head, outcome.status.code, started)
        if len(outcome.message) >= WATCHED_FROM_BYTES:
            kept_bytes = len(message) + len(outcome.message)
            limit_read_time(self._plane.admission, kept_bytes, self._reader_timeout_s, self._count_slow_reader)
        return await _end(outcome, context)

    async def pass_on(
        self, verb: Verb, method: str, message: bytes, model_of: Callable[[bytes], str], context: Context
    ) -> bytes:
        """The engine's response to a call other than an inference. model_of: reads the name from the message."""

        async def work() -> GrpcAnswer:
            head = InferHead(model_of(message))
            return await self._plane.relay(
                verb, head, _call(method, message, context), caller=caller_of(context), deadline=deadline_of(context)
            )

        return await self.answer(work, context)

    async def answer(self, work: Work, context: Context) -> bytes:
        """The result of the work; an error ends the call."""
        return await _end(await self._outcome(work), context)

    def _with_images(self, head: InferHead, call: GrpcCall) -> EncodedCall[GrpcAnswer] | None:
        place = self._plane.image_input(head.model_name)
        return encoded_call(head, call, place) if place is not None else None

    def cut(self) -> None:
        """Ends every running call now, as UNAVAILABLE."""
        self._running.cut("this gateway stopped before the answer came; send to another one")

    def _count_slow_reader(self) -> None:
        self._record.rejected("slow_reader")

    def _count(self, head: InferHead, code: grpc.StatusCode, started: float) -> None:
        if not self._is_counting:
            return
        self._record.request_done(
            model=self._plane.model_label(head.model_name),
            protocol=PROTOCOL,
            code=code.name,
            seconds=time.monotonic() - started,
        )

    async def _outcome(self, work: Work) -> CallOutcome:
        try:
            with self._running:
                answer = await work()
        except InferenceError as error:
            return CallOutcome(refusal_of(self._record, error))
        except Exception as error:  # the task's root: a bug is logged, and the client gets no details
            log.exception("a gRPC call failed unexpectedly")
            return CallOutcome(status_of(error_for_client(error)))
        return CallOutcome(CallStatus(code_of(answer), answer.details, answer.trailing_metadata), answer.message)


async def _end(outcome: CallOutcome, context: Context) -> bytes:
    """The response message, or the end of the call with its status."""
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
    """Deadline by the v2 parameter `timeout`, microseconds from the request's arrival; 0 means none."""
    if not head.timeout_us:
        return None
    if head.timeout_us < 0:
        raise DeadlineExceeded(f"the parameter timeout is {head.timeout_us} µs; it counts from the request's arrival")
    return started + head.timeout_us / 1e6 if head.timeout_us < MAX_DEADLINE_S * 1e6 else None


def _earlier(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


NO_MORE_REQUESTS = "this gateway stops and takes no more requests; open the stream to another one"


class ClientStream(ABC):
    """A client's stream. `drain` ends it in order, `cut` at once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._whole = asyncio.timeout(None)
        self._reading: asyncio.Timeout | None = None
        self._is_draining = False
        self._is_cut_short = False
        self._is_over = False

    @abstractmethod
    async def run(self) -> CallStatus:
        """Serves the stream until one side ends it. Returns the status with which it ends."""

    def drain(self) -> None:
        """Stops reading requests; the stream ends when those that it has are answered. Call it once."""
        self._is_draining = True
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    def cut(self) -> None:
        """Ends the stream now, unless it is ending already."""
        if not self._is_over:
            self._whole.reschedule(asyncio.get_running_loop().time())

    async def _next_message(self, wait_for_room: Callable[[], Awaitable[None]] | None = None) -> bytes | None:
        """The next message, or None: the client half-closed the stream, or the gateway drains."""
        try:
            async with asyncio.timeout(0 if self._is_draining else None) as self._reading:
                if wait_for_room is not None:
                    await wait_for_room()
                message: object = await self._context.read()
        except TimeoutError:
            self._is_cut_short = True
            return None
        finally:
            self._reading = None
        return message if isinstance(message, bytes) else None


class StreamServer(ABC):
    """Serves streams. Open ones end by `drain`, in order, or by `cut`, at once."""

    def __init__(self) -> None:
        self._open: set[ClientStream] = set()
        self._is_draining = False

    async def serve(self, method: str, _: object, context: Context) -> None:
        """Serves one stream, from its first message to its status."""
        try:
            stream = self._opened(method, context)
            self._open.add(stream)
            try:
                if self._is_draining:
                    stream.drain()
                code, details, trailing = await stream.run()
            finally:
                self._open.discard(stream)
        except InferenceError as error:
            code, details, trailing = self._refusal(error)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details, trailing)
        context.set_trailing_metadata(trailing)

    @abstractmethod
    def _opened(self, method: str, context: Context) -> ClientStream:
        """A new stream. Raises InferenceError."""

    def _refusal(self, error: InferenceError) -> CallStatus:
        return status_of(error)

    def drain(self) -> None:
        """Stops accepting requests; a stream ends when its requests are answered."""
        self._is_draining = True
        for stream in self._open:
            stream.drain()

    def cut(self) -> None:
        """Ends every stream now, as UNAVAILABLE."""
        for stream in self._open:
            stream.cut()
