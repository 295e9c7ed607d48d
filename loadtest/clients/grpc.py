"""v2 inference over gRPC, one call a request; messages are serialised beforehand."""

import asyncio
import time
from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from loadtest.clients.client import Answer
from loadtest.clients.grpc_port import SERVICE, GrpcMetadata, closed, judge, refusal
from loadtest.results import Status

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
