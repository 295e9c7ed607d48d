"""ModelStreamInfer of the embedded engine: one response per request, in the order of the requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from penstock.protocol.call import GrpcAnswer
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, InferenceError
from penstock.protocol.grpc_inference import serialised
from penstock.protocol.grpc_messages import varint

MAX_WAITING = 64
# infer_response.parameters["triton_final_response"] = true, as Triton sets it for models that answer once
_FINAL = serialised(
    service_pb2.ModelInferResponse(parameters={"triton_final_response": service_pb2.InferParameter(bool_param=True)})
)
_RESPONSE_TAG = b"\x12"  # ModelStreamInferResponse.infer_response: field 2, length-delimited

Infer = Callable[[bytes], Awaitable[bytes]]


class OrderedStream:
    """A GrpcStream of concurrent unary inferences, with responses in order. At most MAX_WAITING are in flight."""

    def __init__(self, infer: Infer, *, deadline: float | None) -> None:
        self._infer = infer
        self._deadline = deadline
        self._running: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(MAX_WAITING)
        self._tasks: set[asyncio.Task[bytes]] = set()
        self._error: InferenceError | None = None

    async def send(self, message: bytes) -> None:
        task = asyncio.create_task(self._infer_one(message))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        await self._running.put(task)

    async def half_close(self) -> None:
        await self._running.put(None)

    async def receive(self) -> bytes | None:
        if self._error is not None:
            return None
        try:
            async with asyncio.timeout(self._left_s()):
                task = await self._running.get()
                return None if task is None else await task
        except TimeoutError:
            self._error = DeadlineExceeded("the stream's deadline passed")
        except (EngineUnavailable, DeadlineExceeded) as error:
            self._error = error
        return None

    async def end(self) -> GrpcAnswer:
        if self._error is not None:
            raise self._error
        return GrpcAnswer(0)

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    def _forget(self, task: "asyncio.Task[bytes]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marked as retrieved: the reader may have been cancelled

    async def _infer_one(self, message: bytes) -> bytes:
        try:
            return streamed(await self._infer(message))
        except (EngineUnavailable, DeadlineExceeded):
            raise
        except InferenceError as error:
            return _refused(message, error)

    def _left_s(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()


def streamed(response: bytes) -> bytes:
    """Wraps a ModelInferResponse into a ModelStreamInferResponse marked as final."""
    return b"".join((_RESPONSE_TAG, varint(len(response) + len(_FINAL)), response, _FINAL))


def _refused(message: bytes, error: InferenceError) -> bytes:
    answer = service_pb2.ModelStreamInferResponse(error_message=error.message)
    try:
        answer.infer_response.id = service_pb2.ModelInferRequest.FromString(message).id
    except DecodeError:
        answer.infer_response.id = ""
    return serialised(answer)
