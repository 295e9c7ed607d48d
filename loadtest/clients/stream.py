"""v2 inference over one long bidirectional gRPC stream; answers find their requests by id.

The stream is opened with the first request, and again by the first one after it broke. Of a decoupled model a request's
answer is complete with the response that says so (`triton_final_response`), and counts until then.
"""

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from loadtest.clients.client import Answer
from loadtest.clients.grpc_port import SERVICE, GrpcMetadata, closed, judge, refusal
from loadtest.clients.replies import short
from loadtest.results import Status

MODEL_STREAM_INFER = f"{SERVICE}/ModelStreamInfer"
MOST_WAITING = 16_384
_ID_FIELD = b"\x1a"  # ModelInferRequest.id: field 3, length-delimited; fields may come in any order
_FINAL = "triton_final_response"
_UNWRITTEN = "Internal error from Core"
_LAST_WORD_TRIES, _LAST_WORD_TRY_S = 50, 0.01

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
        for _ in range(_LAST_WORD_TRIES):
            for code, details in self._words:
                if details != _UNWRITTEN:
                    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, "")
            await asyncio.sleep(_LAST_WORD_TRY_S)
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
