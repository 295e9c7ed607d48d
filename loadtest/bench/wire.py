"""Calls of the v2 protocol as bytes made beforehand, so that the load generator costs as little as it can."""

import json
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import aiohttp
import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from penstock.protocol.inference import Tensor

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
TIMEOUT_S = 60.0
CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class BadAnswer(Exception):
    """A call of a bench failed, so its figure would mean nothing."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One POST, ready to be sent again and again."""

    path: str
    headers: dict[str, str]
    body: bytes


class BenchHttp:
    """A v2 server's HTTP port. Opens as many connections as there are calls at once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(TIMEOUT_S),
            headers={"Accept-Encoding": "identity"},  # Triton would compress its answer: 20 ms of CPU for 600 kB
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, request: BenchRequest) -> bytes:
        """The answer's body. Raises BadAnswer for any status but 200."""
        status, body = await self.send(request)
        if status != 200:
            raise BadAnswer(f"{self._url}{request.path} answered {status}: {body[:300]!r}")
        return body

    async def send(self, request: BenchRequest) -> tuple[int, bytes]:
        """The answer's status and body."""
        async with self._session.post(self._url + request.path, data=request.body, headers=request.headers) as answer:
            return answer.status, await answer.read()


class GrpcPort:
    """A v2 server's gRPC port, over one connection."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def model_infer(self, message: bytes) -> bytes:
        """The answer, serialised. Raises BadAnswer for any status but OK."""
        return await self._call(MODEL_INFER, message)

    async def model_config(self, model_name: str) -> service_pb2.ModelConfigResponse:
        """What Triton makes of the model's config.pbtxt. Raises BadAnswer."""
        request = service_pb2.ModelConfigRequest(name=model_name).SerializeToString()
        answer = await self._call("/inference.GRPCInferenceService/ModelConfig", request)
        return service_pb2.ModelConfigResponse.FromString(answer)

    async def _call(self, method: str, message: bytes) -> bytes:
        try:
            call = self._channel.unary_unary(method, request_serializer=None, response_deserializer=None)
            answer: bytes = await call(message, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise BadAnswer(f"{method} answered {error.code().name}: {error.details()}") from error
        return answer


def http_infer(model_name: str, tensor: Tensor) -> BenchRequest:
    """The tensor as binary data behind the JSON; the outputs are asked for as binary data, too."""
    described = {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": tensor.shape,
        "parameters": {"binary_data_size": tensor.data.nbytes},
    }
    head = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return BenchRequest(f"/v2/models/{model_name}/infer", headers, head + bytes(tensor.data))


def grpc_infer(model_name: str, tensor: Tensor) -> bytes:
    """The tensor as a ModelInferRequest with raw contents, serialised."""
    request = service_pb2.ModelInferRequest(model_name=model_name)
    request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    request.raw_input_contents.append(bytes(tensor.data))
    message: bytes = request.SerializeToString()
    return message
