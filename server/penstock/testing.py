"""A fake engine for tests, with the interfaces of a real one, without a process or port."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from enum import StrEnum
from typing import cast

import numpy as np
from tritonclient.grpc import service_pb2

from penstock.engines.config_pbtxt import config_message
from penstock.engines.embedded.grpc_stream import OrderedStream
from penstock.protocol.call import A, Call, GrpcAnswer, GrpcCall, GrpcMetadata, HttpAnswer, HttpCall, HttpStream
from penstock.protocol.engine import GrpcStream, ModelConfig, ModelMetadata, ModelState, TensorSpec
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    ModelNotFound,
    ModelNotReady,
)
from penstock.protocol.grpc_inference import decode_request, encode_response, index_message, metadata_message
from penstock.protocol.inference import Datatype, InferRequest, InferResponse, Tensor, Timings, tensor_from_bytes

OK, INVALID_ARGUMENT, NOT_FOUND, UNIMPLEMENTED, INTERNAL = 0, 3, 5, 12, 13
EXTENSIONS = ("classification", "model_repository", "model_configuration", "system_shared_memory", "statistics")

Answer = Callable[[InferRequest], Sequence[Tensor]]


class FakeMode(StrEnum):
    """SLOW: waits for `release`. ERROR: inferences fail. GARBAGE: wrong outputs. NAN: floats are NaN."""

    NORMAL = "normal"
    SLOW = "slow"
    ERROR = "error"
    GARBAGE = "garbage"
    NAN = "nan"
    UNAVAILABLE = "unavailable"


class FakeEngine:
    """Engine and Relay over model configs.

    answer: computes the outputs; by default zeros of the declared shapes, variable dimensions 1, batch dimension as the
    first input's. mode and http_answer may be changed at any time. calls, grpc_calls, http_calls, streams (their
    metadata): received, in order.
    """

    def __init__(
        self, models: Iterable[ModelConfig] = (), *, mode: FakeMode = FakeMode.NORMAL, answer: Answer | None = None
    ) -> None:
        self.mode = mode
        self.http_answer = HttpAnswer(200, ((b"content-type", b"application/json"),), b"{}")
        self.load_failures: dict[str, str] = {}
        self.calls: list[InferRequest] = []
        self.grpc_calls: list[GrpcCall] = []
        self.http_calls: list[HttpCall] = []
        self.streams: list[GrpcMetadata] = []
        self.cancelled = 0
        self.open_streams = 0
        self.release = asyncio.Event()
        self._configs = {config.name: config for config in models}
        self._loaded = set(self._configs)
        self._answer = answer

    # Backend

    async def infer(self, request: InferRequest) -> InferResponse:
        self._require_reachable()
        self.calls.append(request)
        config = self._find(request.model_name)
        started = time.monotonic()
        await self._spend_time(request.deadline)
        if self.mode is FakeMode.ERROR:
            raise EngineFailed(f"model {request.model_name!r} failed: the fake engine is in mode ERROR")
        outputs = self._outputs(config, request)
        wanted = tuple(tensor for tensor in outputs if not request.outputs or tensor.name in request.outputs)
        timings = Timings(infer=time.monotonic() - started)
        return InferResponse(config.name, request.model_version or "1", wanted, request.id, timings=timings)

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata:
        self._require_reachable()
        config = self._find(model_name)
        return config.metadata(("1",), config.backend)

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        self._require_reachable()
        return self._find(model_name)

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        return self.mode is not FakeMode.UNAVAILABLE and (not model_name or model_name in self._loaded)

    async def repository_index(self) -> list[ModelState]:
        self._require_reachable()
        return [
            ModelState(name, "1", *(("READY", "") if name in self._loaded else ("UNAVAILABLE", "unloaded")))
            for name in self._configs
        ]

    async def load(self, model_name: str) -> None:
        self._require_reachable()
        if model_name in self.load_failures or model_name not in self._configs:
            reason = self.load_failures.get(model_name, "it is not in the repository")
            raise ModelNotReady(f"model {model_name!r} cannot be loaded: {reason}")
        self._loaded.add(model_name)

    async def unload(self, model_name: str) -> None:
        self._require_reachable()
        self._loaded.discard(model_name)

    async def metrics(self) -> bytes:
        return b"" if self.mode is FakeMode.UNAVAILABLE else b"nv_inference_count %d\n" % len(self.calls)

    async def aclose(self) -> None:
        self.mode = FakeMode.UNAVAILABLE

    # Relay

    async def send(self, call: Call[A], *, deadline: float | None) -> A:
        """Over HTTP `http_answer`; over gRPC the response of an engine with these models."""
        self._require_reachable()
        if isinstance(call, HttpCall):
            self.http_calls.append(call)
            await self._spend_time(deadline)
            return cast(A, self.http_answer)
        grpc_call = cast(GrpcCall, call)
        self.grpc_calls.append(grpc_call)
        return cast(A, await self._grpc_answer(grpc_call, deadline))

    async def _grpc_answer(self, call: GrpcCall, deadline: float | None) -> GrpcAnswer:
        """UNIMPLEMENTED for methods that the fake does not have."""
        try:
            return GrpcAnswer(OK, await self._serve(call.method.rpartition("/")[2], call.message, deadline))
        except (EngineUnavailable, DeadlineExceeded):
            raise
        except ModelNotFound as error:
            return GrpcAnswer(NOT_FOUND, details=str(error))
        except ModelNotReady as error:
            return GrpcAnswer(INVALID_ARGUMENT, details=str(error))
        except EngineFailed as error:
            return GrpcAnswer(INTERNAL, details=str(error))
        except InferenceError as error:
            return GrpcAnswer(UNIMPLEMENTED, details=str(error))

    async def stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        """`http_answer` in one chunk. open_streams counts those not yet read or closed."""
        answer = await self.send(call, deadline=deadline)
        self.open_streams += 1
        chunks = self._one_piece(answer.body)
        await anext(chunks)  # an empty chunk: from here on, closing the generator reaches its finally
        return HttpStream(answer.status, answer.headers, chunks)

    async def _one_piece(self, body: bytes) -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            yield body
        finally:
            self.open_streams -= 1

    async def open_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> GrpcStream:
        """Responses in order, like ModelInfer's."""
        self._require_reachable()
        self.streams.append(metadata)
        return OrderedStream(lambda message: self._serve("ModelInfer", message, deadline), deadline=deadline)

    async def _serve(self, method: str, message: bytes, deadline: float | None) -> bytes:
        if method == "ModelInfer":
            return encode_response(await self.infer(decode_request(message, deadline)))
        if method == "RepositoryModelLoad":
            await self.load(service_pb2.RepositoryModelLoadRequest.FromString(message).model_name)
            return b""
        if method == "RepositoryModelUnload":
            await self.unload(service_pb2.RepositoryModelUnloadRequest.FromString(message).model_name)
            return b""
        answer = await self._describe(method, service_pb2.ModelMetadataRequest.FromString(message).name)
        serialised: bytes = answer.SerializeToString()
        return serialised

    async def _describe(self, method: str, model_name: str) -> "service_pb2.Message":
        if method == "ServerMetadata":
            return service_pb2.ServerMetadataResponse(name="fake", version="0", extensions=EXTENSIONS)
        if method == "ModelReady":
            return service_pb2.ModelReadyResponse(ready=await self.ready(model_name))
        if method == "RepositoryIndex":
            return index_message(await self.repository_index())
        if method == "ModelMetadata":
            return metadata_message(await self.model_metadata(model_name))
        if method == "ModelConfig":
            return service_pb2.ModelConfigResponse(config=config_message(self._find(model_name)))
        raise InferenceError(f"the fake engine has no {method}")

    # behaviour

    def _require_reachable(self) -> None:
        if self.mode is FakeMode.UNAVAILABLE:
            raise EngineUnavailable("the fake engine does not answer")

    def _find(self, model_name: str) -> ModelConfig:
        if model_name not in self._loaded:
            raise ModelNotFound(f"Request for unknown model: '{model_name}' is not found")
        return self._configs[model_name]

    async def _spend_time(self, deadline: float | None) -> None:
        if self.mode is not FakeMode.SLOW:
            return
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await self.release.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("the fake engine did not answer in time") from error
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _outputs(self, config: ModelConfig, request: InferRequest) -> Sequence[Tensor]:
        if self.mode is FakeMode.GARBAGE:
            return (tensor_from_bytes("garbage", [b"\x00garbage"]),)
        rows = request.inputs[0].shape[:1] if request.inputs and config.max_batch_size else ()
        outputs = self._answer(request) if self._answer else [_zeros(spec, rows) for spec in config.outputs]
        return [_not_a_number(tensor) for tensor in outputs] if self.mode is FakeMode.NAN else outputs


def _zeros(spec: TensorSpec, rows: tuple[int, ...]) -> Tensor:
    shape = (*rows, *(1 if size < 0 else size for size in spec.shape))
    count = int(np.prod(shape, dtype=np.int64))
    size_bytes = spec.datatype.size_bytes or 4
    return Tensor(spec.name, spec.datatype, shape, memoryview(bytes(count * size_bytes)))


def _not_a_number(tensor: Tensor) -> Tensor:
    if tensor.datatype not in (Datatype.FP16, Datatype.FP32, Datatype.FP64):
        return tensor
    filled = np.full_like(tensor.to_numpy(), np.nan)
    return Tensor(tensor.name, tensor.datatype, tensor.shape, filled.reshape(-1).view(np.uint8).data)
