"""gRPC: channels, model metadata, unary inference and bidirectional streams."""

import asyncio
import itertools
import re
import time
from collections.abc import Coroutine, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from penstock_load.clients.client import Answer, Endpoint, TargetError, grpc_refusal, short
from penstock_load.clients.payloads import (
    IndexedModel,
    InputSpec,
    ModelSignature,
    no_model,
    nothing_answers,
    ready_names,
)
from penstock_load.results import Status

SERVICE = "/inference.GRPCInferenceService"
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection a channel
    ("grpc.enable_retries", 0),  # an error is an error
    ("grpc.enable_http_proxy", 0),
    # A server that comes back is asked again within a second, not within two minutes. The minimum is the time that a
    # connection may take: with 100 ms a busy gateway was "unavailable".
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# A server that knows our deadline answers at it, too, and its answer may come a moment before our own timeout.
DEADLINE_MARGIN_S = 0.05

GrpcMetadata = tuple[tuple[str, str], ...]


def open_channel(endpoint: Endpoint) -> grpc.aio.Channel:
    """A connection of its own, with TLS where the endpoint's http_url has it. Made inside the event loop."""
    if endpoint.http_url.startswith("https://"):
        return grpc.aio.secure_channel(endpoint.grpc_address, grpc.ssl_channel_credentials(), CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(endpoint.grpc_address, CHANNEL_OPTIONS)


def metadata_of(endpoint: Endpoint) -> GrpcMetadata:
    """The endpoint's headers as gRPC wants them: names in lower case.

    Raises TargetError for what it does not take: some signs of HTTP's names, names that end in -bin, tabs in values.
    """
    for name, value in endpoint.headers:
        if not re.fullmatch(r"[0-9a-z_.-]+(?<!-bin)", name.lower()) or not re.fullmatch("[ -~]*", value):
            raise TargetError(f"the header {name!r} cannot travel over gRPC: name and value are plain text there")
    return tuple((name.lower(), value) for name, value in endpoint.headers)


def judge(found: Set[str], wanted: frozenset[str], sizes: tuple[int, int]) -> Answer:
    """OK where an answer holds every wanted output. sizes: bytes sent and received."""
    missing = wanted - found
    if not missing:
        return Answer(Status.OK, "OK", "", *sizes)
    return Answer(Status.FAILED, "OK", short(f"the answer has no output {', '.join(sorted(missing))}"), *sizes)


def refusal(error: grpc.aio.AioRpcError, channel: grpc.aio.Channel, sent_bytes: int, *, left_s: float) -> Answer:
    """The answer of a call that did not end OK. left_s: until our own deadline, when it ended."""
    is_connected = channel.get_state() is grpc.ChannelConnectivity.READY
    return grpc_refusal(error, sent_bytes, is_connected=is_connected, is_late=left_s <= DEADLINE_MARGIN_S)


def closed(sent_bytes: int) -> Answer:
    """Of a request to a client that was closed under it."""
    return Answer(Status.FAILED, "", "the client was closed before the answer came", sent_bytes)


class GrpcTarget:
    """Asks over a channel that others use, too."""

    def __init__(self, channel: grpc.aio.Channel, endpoint: Endpoint, timeout_s: float) -> None:
        self._channel = channel
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    async def model(self, name: str) -> ModelSignature:
        """The model's inputs and outputs. Raises TargetError where nothing answers or it is not served."""
        message = service_pb2.ModelMetadataRequest(name=name).SerializeToString()
        try:
            reply = service_pb2.ModelMetadataResponse.FromString(await self._ask("ModelMetadata", message))
        except grpc.aio.AioRpcError as error:
            raise TargetError(await self._why_no_model(name, error)) from error
        except DecodeError:
            where = f"gRPC at {self._endpoint.grpc_address}"
            raise TargetError(f"{where} is no KServe v2 server (ModelMetadata answered something else)") from None
        inputs = tuple(InputSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in reply.inputs)
        return ModelSignature(
            inputs, frozenset(tensor.name for tensor in reply.outputs), await self._is_decoupled(name)
        )

    async def models(self) -> tuple[str, ...]:
        """The ready models' names; none if the server has no repository index."""
        try:
            answer = await self._ask("RepositoryIndex", b"")
        except grpc.aio.AioRpcError:
            return ()
        index = service_pb2.RepositoryIndexResponse.FromString(answer)
        return ready_names(IndexedModel(model.name, model.state) for model in index.models)

    async def _is_decoupled(self, name: str) -> bool:
        try:
            answer = await self._ask("ModelConfig", service_pb2.ModelConfigRequest(name=name).SerializeToString())
        except grpc.aio.AioRpcError:
            return False  # a server without the extension has no such models either
        return bool(service_pb2.ModelConfigResponse.FromString(answer).config.model_transaction_policy.decoupled)

    async def _ask(self, method: str, message: bytes) -> bytes:
        call = self._channel.unary_unary(f"{SERVICE}/{method}", None, None)
        answer: bytes = await call(message, timeout=self._timeout_s, metadata=metadata_of(self._endpoint))
        return answer

    async def _why_no_model(self, name: str, error: grpc.aio.AioRpcError) -> str:
        where = f"gRPC at {self._endpoint.grpc_address}"
        reply = f"{error.code().name}: {short(error.details() or '')}"
        if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            return nothing_answers(where, reply)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return nothing_answers(where, f"it took longer than {self._timeout_s:g} s")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return f"{where} is no KServe v2 server (ModelMetadata answered {reply})"
        return no_model(where, name, await self.models(), reply)


MODEL_INFER = f"{SERVICE}/ModelInfer"


class GrpcClient:
    """Sends prepared messages in turn, by number, over one connection."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        messages: Sequence[bytes],
        *,
        outputs: frozenset[str],
        metadata: GrpcMetadata,
        timeout_s: float,
    ) -> None:
        """outputs: that an answer must hold."""
        self._channel = channel
        self._call = channel.unary_unary(MODEL_INFER, None, None)
        self._messages = messages
        self._outputs = outputs
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._is_closed = False

    async def send(self, number: int) -> Answer:
        """The message with that number, counted round, and what became of it."""
        message = self._messages[number % len(self._messages)]
        deadline_s = time.monotonic() + self._timeout_s
        try:
            answer: bytes = await self._call(message, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return refusal(error, self._channel, len(message), left_s=deadline_s - time.monotonic())
        except grpc.aio.UsageError:  # the channel is closed
            return closed(len(message))
        except asyncio.CancelledError:
            if self._is_closed and not _is_cancelled():
                return closed(len(message))
            raise
        return self._judge(answer, len(message))

    async def aclose(self) -> None:
        """Closes the connection; what waits fails."""
        self._is_closed = True
        await self._channel.close(None)

    def _judge(self, answer: bytes, sent_bytes: int) -> Answer:
        try:
            response = service_pb2.ModelInferResponse.FromString(answer)
        except DecodeError:
            return Answer(Status.FAILED, "OK", "the answer is no ModelInferResponse", sent_bytes, len(answer))
        return judge({output.name for output in response.outputs}, self._outputs, (sent_bytes, len(answer)))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


MODEL_STREAM_INFER = f"{SERVICE}/ModelStreamInfer"
MOST_WAITING = 16_384
_ID_FIELD = b"\x1a"  # ModelInferRequest.id: field 3, length-delimited; fields may come in any order
_FINAL = "triton_final_response"
_UNWRITTEN = "Internal error from Core"
_FINAL_STATUS_TRIES, _FINAL_STATUS_TRY_S = 50, 0.01

AnswerT = TypeVar("AnswerT")


@dataclass(slots=True)
class _Waiting:
    """A request on its way. outputs, received_bytes: of its responses so far."""

    answer: asyncio.Future[Answer]
    deadline_s: float
    sent_bytes: int
    outputs: set[str] = field(default_factory=set)
    received_bytes: int = 0

    def end(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class StreamClient:
    """Sends prepared messages in turn, by number, over one stream at a time."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        messages: Sequence[bytes],
        *,
        outputs: frozenset[str],
        metadata: GrpcMetadata,
        timeout_s: float,
    ) -> None:
        """messages: ModelInferRequests without an id. outputs: that an answer must hold."""
        self._channel = channel
        self._messages = messages
        self._outputs = outputs
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._stream: _Stream | None = None
        self._is_closed = False

    async def send(self, number: int) -> Answer:
        """The message with that number, counted round, and what became of it."""
        message = self._messages[number % len(self._messages)]
        if self._is_closed:
            return closed(len(message))
        stream = self._open_stream()
        if len(stream.waiting) >= MOST_WAITING:
            return Answer(Status.NOT_SENT, "", f"{MOST_WAITING} requests wait on the stream (limit {MOST_WAITING})")
        request_id = str(next(self._ids))
        waiting = stream.put(request_id, message)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await waiting.answer
        except TimeoutError:
            return Answer(Status.TIMEOUT, "", f"no answer within {self._timeout_s:g} s", len(message))
        finally:
            stream.forget(request_id)

    async def aclose(self) -> None:
        """Closes stream and connection; what waits fails."""
        self._is_closed = True
        if self._stream is not None:
            await self._stream.aclose()
        await self._channel.close(None)

    def _open_stream(self) -> "_Stream":
        if self._stream is None or self._stream.is_over:
            self._stream = _Stream(self._channel, self._metadata, self._outputs, self._timeout_s)
        return self._stream


class _Stream:
    """One call of ModelStreamInfer, until it ends. is_over: whether it did."""

    def __init__(
        self, channel: grpc.aio.Channel, metadata: GrpcMetadata, outputs: frozenset[str], timeout_s: float
    ) -> None:
        self.waiting: dict[str, _Waiting] = {}
        self.is_over = False
        self._channel = channel
        self._call = channel.stream_stream(MODEL_STREAM_INFER, None, None)(None, metadata=metadata)
        self._words: list[tuple[grpc.StatusCode, str]] = []
        self._call.add_done_callback(self._hear)  # called each time that the call's status is set
        self._outputs = outputs
        self._timeout_s = timeout_s
        self._outgoing: dict[str, bytes] = {}
        self._has_outgoing = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def put(self, request_id: str, message: bytes) -> _Waiting:
        waiting = _Waiting(asyncio.get_running_loop().create_future(), time.monotonic() + self._timeout_s, len(message))
        self.waiting[request_id] = waiting
        self._outgoing[request_id] = message
        self._has_outgoing.set()
        return waiting

    def forget(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)
        self._outgoing.pop(request_id, None)

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        writer = asyncio.create_task(self._write())
        try:
            await self._read()
            self._end_all("the server ended the stream")
        except grpc.aio.AioRpcError as error:
            self.is_over = True
            self._end_all(await self._last_word(error))
        finally:
            self._end_all("the stream was closed before the answer came")
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            self._call.cancel()

    async def _write(self) -> None:
        while True:
            await self._has_outgoing.wait()
            while self._outgoing:
                request_id = next(iter(self._outgoing))
                message = self._outgoing.pop(request_id)
                try:
                    await self._call.write(_ID_FIELD + bytes((len(request_id),)) + request_id.encode() + message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the call has ended, and the reader says how
            self._has_outgoing.clear()

    async def _read(self) -> None:
        while True:
            message = await self._call.read()
            if not isinstance(message, bytes):
                return
            try:
                self._take(service_pb2.ModelStreamInferResponse.FromString(message), len(message))
            except DecodeError:
                self._end_all("the stream holds something that is no ModelStreamInferResponse")
                return

    def _hear(self, call: object) -> None:
        self._words.append((_done(self._call.code()), _done(self._call.details())))

    async def _last_word(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The server's own, which grpc.aio mixes up with its INTERNAL for a write that the end of the call overtook."""
        for _ in range(_FINAL_STATUS_TRIES):
            for code, details in self._words:
                if details != _UNWRITTEN:
                    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, "")
            await asyncio.sleep(_FINAL_STATUS_TRY_S)
        return error

    def _take(self, message: service_pb2.ModelStreamInferResponse, size_bytes: int) -> None:
        response = message.infer_response
        request_id = response.id or next(iter(self.waiting), "")  # in order, where the server does not repeat the id
        waiting = self.waiting.get(request_id)
        if waiting is None:
            return  # its deadline has passed
        waiting.received_bytes += size_bytes
        sizes = (waiting.sent_bytes, waiting.received_bytes)
        if message.error_message:
            waiting.end(Answer(Status.FAILED, "", short(message.error_message), *sizes))
        else:
            waiting.outputs.update(output.name for output in response.outputs)
            if _FINAL in response.parameters and not response.parameters[_FINAL].bool_param:
                return
            waiting.end(judge(waiting.outputs, self._outputs, sizes))
        del self.waiting[request_id]

    def _end_all(self, why: "str | grpc.aio.AioRpcError") -> None:
        self.is_over = True
        for waiting in self.waiting.values():
            waiting.end(self._failure(waiting, why))
        self.waiting.clear()

    def _failure(self, waiting: _Waiting, why: "str | grpc.aio.AioRpcError") -> Answer:
        if isinstance(why, str):
            return Answer(Status.FAILED, "", why, waiting.sent_bytes, waiting.received_bytes)
        return refusal(why, self._channel, waiting.sent_bytes, left_s=waiting.deadline_s - time.monotonic())


def _done(answer: Coroutine[None, None, AnswerT]) -> AnswerT:
    """The result of a coroutine that has nothing to wait for."""
    try:
        answer.send(None)
    except StopIteration as end:
        result: AnswerT = end.value
        return result
    raise AssertionError("a call that is done has its status")
