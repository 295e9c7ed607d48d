"""An engine's side of a stream that a test plays itself, and the client's side of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from tritonclient.grpc import service_pb2

from penstock.protocol.call import GrpcAnswer
from penstock.protocol.errors import InferenceError
from tests.grpc.harness import SERVICE, Front

STREAM = f"{SERVICE}ModelStreamInfer"
WAIT_S = 30.0


class ScriptedStream:
    """The engine's side: `sent` has what came, `say` answers, `finish` ends it."""

    def __init__(self) -> None:
        self.sent: list[service_pb2.ModelInferRequest] = []
        self.is_half_closed = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.ending: GrpcAnswer | InferenceError = GrpcAnswer(0)
        self._came = asyncio.Condition()
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send(self, message: bytes) -> None:
        async with self._came:
            self.sent.append(service_pb2.ModelInferRequest.FromString(message))
            self._came.notify_all()

    async def half_close(self) -> None:
        self.is_half_closed.set()

    async def receive(self) -> bytes | None:
        return await self._answers.get()

    async def end(self) -> GrpcAnswer:
        if isinstance(self.ending, InferenceError):
            raise self.ending
        return self.ending

    def cancel(self) -> None:
        self.is_cancelled.set()

    async def has(self, count: int) -> None:
        """Returns when so many requests have come."""
        async with asyncio.timeout(WAIT_S), self._came:
            await self._came.wait_for(lambda: len(self.sent) >= count)

    def say(self, request_id: str, *, model: str = "double", is_final: bool = True, is_empty: bool = False) -> bytes:
        """Answer, as Triton forms it; the same bytes."""
        answer = service_pb2.ModelStreamInferResponse()
        answer.infer_response.model_name, answer.infer_response.id = model, request_id
        answer.infer_response.parameters["triton_final_response"].bool_param = is_final
        if not is_empty:
            answer.infer_response.model_version = "1"
            answer.infer_response.outputs.add(name="y", datatype="FP32", shape=[1])
            answer.infer_response.raw_output_contents.append(bytes(4))
        return self._put(answer)

    def fail(self, request_id: str, text: str, *, model: str = "", is_final: bool | None = None) -> bytes:
        """Answer with an error; without a model it is one that no model has seen."""
        answer = service_pb2.ModelStreamInferResponse(error_message=text)
        answer.infer_response.model_name, answer.infer_response.id = model, request_id
        if is_final is not None:
            answer.infer_response.parameters["triton_final_response"].bool_param = is_final
        return self._put(answer)

    def finish(self, ending: GrpcAnswer | InferenceError | None = None) -> None:
        """No further answers; OK, or as is said."""
        self.ending = ending or self.ending
        self._answers.put_nowait(None)

    def _put(self, answer: "service_pb2.ModelStreamInferResponse") -> bytes:
        message: bytes = answer.SerializeToString()
        self._answers.put_nowait(message)
        return message


class ClientStream:
    """The client's side."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        self.call = call

    async def ask(self, model: str, request_id: str = "", **parameters: bool) -> None:
        """One request, of one number."""
        request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        request.raw_input_contents.append(bytes(4))
        for name, value in parameters.items():
            request.parameters[name].bool_param = value
        await self.call.write(request.SerializeToString())

    async def hear(self) -> service_pb2.ModelStreamInferResponse:
        """The next answer."""
        return service_pb2.ModelStreamInferResponse.FromString(await self.hear_bytes())

    async def hear_bytes(self) -> bytes:
        """The next answer as it came."""
        async with asyncio.timeout(WAIT_S):
            message = await self.call.read()
        assert isinstance(message, bytes)
        return message

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended, after all that was still to be read."""
        async with asyncio.timeout(WAIT_S):
            try:
                while isinstance(await self.call.read(), bytes):
                    pass
            except grpc.aio.AioRpcError:
                pass
            return await self.call.code(), await self.call.details()


@asynccontextmanager
async def streaming(
    front: Front, *, metadata: tuple[tuple[str, str | bytes], ...] = (), timeout_s: float | None = None
) -> AsyncIterator[ClientStream]:
    """A stream to the front, cancelled at the end."""
    call = front.channel.stream_stream(STREAM, None, None)(None, timeout_s, metadata)
    try:
        yield ClientStream(call)
    finally:
        call.cancel()
