"""Answers KServe v2 calls of HTTP and gRPC as Triton does, for engines in this process."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import cast

from tritonclient.grpc import service_pb2

from penstock import VERSION
from penstock.engines.concurrency import in_thread
from penstock.engines.embedded.grpc_stream import OrderedStream
from penstock.engines.embedded.http_routes import HttpRoutes
from penstock.engines.embedded.inference import (
    CONFIG_PARAMETER,
    EXTENSIONS,
    NAME,
    NO_LOG_SETTINGS,
    NO_TRACE_SETTINGS,
    ServedModels,
    infer,
    refuse_load_parameter,
    refuse_repository,
    response_bytes,
    version_number,
)
from penstock.protocol.call import A, Call, GrpcAnswer, GrpcCall, GrpcMetadata, HttpCall, HttpStream
from penstock.protocol.codec import codec_of
from penstock.protocol.engine import GrpcStream
from penstock.protocol.error_codes import ENGINE_ERRORS
from penstock.protocol.errors import InvalidRequest, ModelNotReady, NotSupported
from penstock.protocol.grpc_inference import (
    decode_infer_message,
    encode_response,
    index_message,
    metadata_message,
    parsed_request,
    serialised,
)

Answer = Callable[["GrpcMethods", bytes, float | None], Awaitable[bytes]]


class GrpcMethods:
    """The engine's gRPC methods on serialised messages. Raises InferenceError."""

    def __init__(self, engine: ServedModels) -> None:
        self._engine = engine

    async def answer(self, method: str, message: bytes, deadline: float | None) -> bytes:
        """method: the gRPC path. Raises NotSupported for unknown ones."""
        handle = _METHODS.get(method)
        if handle is None:
            name = method.rpartition("/")[2]
            raise NotSupported(_UNSUPPORTED.get(name, f"an engine in the gateway's process has no {name}"))
        return await handle(self, message, deadline)

    async def infer(self, message: bytes, deadline: float | None) -> bytes:
        request = await in_thread(len(message), parsed_request, service_pb2.ModelInferRequest, message)
        model, version = request.model_name, request.model_version
        self._engine.labels(model, version, "")  # first, so that an unknown model is reported before a bad message
        ask = await in_thread(len(message), decode_infer_message, request)
        response = await infer(self._engine, ask, model=model, version=version, deadline=deadline)
        return await in_thread(response_bytes(response), encode_response, response)

    async def live(self, _: bytes, __: float | None) -> bytes:
        return serialised(service_pb2.ServerLiveResponse(live=True))

    async def ready(self, _: bytes, __: float | None) -> bytes:
        return serialised(service_pb2.ServerReadyResponse(ready=await self._engine.ready()))

    async def server(self, _: bytes, __: float | None) -> bytes:
        return serialised(service_pb2.ServerMetadataResponse(name=NAME, version=VERSION, extensions=EXTENSIONS))

    async def model_ready(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.ModelReadyRequest, message)
        version_number(request.version)
        is_ready = bool(request.name) and await self._engine.ready(request.name, request.version)
        return serialised(service_pb2.ModelReadyResponse(ready=is_ready))

    async def metadata(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.ModelMetadataRequest, message)
        return serialised(metadata_message(await self._engine.model_metadata(request.name, request.version)))

    async def config(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.ModelConfigRequest, message)
        config = self._engine.config_message(request.name, request.version)
        return serialised(service_pb2.ModelConfigResponse(config=config))

    async def statistics(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.ModelStatisticsRequest, message)
        found = self._engine.statistics(request.name, request.version)
        return serialised(service_pb2.ModelStatisticsResponse(model_stats=found))

    async def index(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.RepositoryIndexRequest, message)
        refuse_repository(request.repository_name)
        rows = await self._engine.repository_index()
        return serialised(index_message([row for row in rows if row.state == "READY" or not request.ready]))

    async def load(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.RepositoryModelLoadRequest, message)
        refuse_repository(request.repository_name)
        for name in request.parameters:
            refuse_load_parameter(name)
        try:
            await self._engine.load(request.model_name, _config(request.parameters))
        except ModelNotReady as error:
            raise InvalidRequest(error.message) from error
        return b""

    async def register(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.SystemSharedMemoryRegisterRequest, message)
        offset, size_bytes = request.offset, request.byte_size
        self._engine.regions.register(request.name, request.key, offset=offset, size_bytes=size_bytes)
        return b""

    async def unregister(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.SystemSharedMemoryUnregisterRequest, message)
        self._engine.regions.unregister(request.name)
        return b""

    async def regions(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.SystemSharedMemoryStatusRequest, message)
        answer = service_pb2.SystemSharedMemoryStatusResponse()
        for region in self._engine.regions.listed(request.name):
            row = answer.regions[region.name]
            row.name, row.key, row.offset, row.byte_size = region.name, region.key, region.offset, region.size_bytes
        return serialised(answer)

    async def unload(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.RepositoryModelUnloadRequest, message)
        refuse_repository(request.repository_name)
        dependents = request.parameters.get("unload_dependents")
        if dependents is not None and dependents.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidRequest("invalid value type for 'unload_dependents' parameter, expected bool_param.")
        await self._engine.unload(request.model_name)
        return b""


_UNSUPPORTED = {"TraceSetting": NO_TRACE_SETTINGS, "LogSettings": NO_LOG_SETTINGS}


def _config(parameters: "Mapping[str, service_pb2.ModelRepositoryParameter]") -> str | None:
    if CONFIG_PARAMETER not in parameters:
        return None
    if parameters[CONFIG_PARAMETER].WhichOneof("parameter_choice") != "string_param":
        raise InvalidRequest("invalid value type for load parameter 'config', expected string_param.")
    text: str = parameters[CONFIG_PARAMETER].string_param
    return text


_METHODS: Mapping[str, Answer] = {
    f"/inference.GRPCInferenceService/{name}": handle
    for name, handle in {
        "ModelInfer": GrpcMethods.infer,
        "ServerLive": GrpcMethods.live,
        "ServerReady": GrpcMethods.ready,
        "ServerMetadata": GrpcMethods.server,
        "ModelReady": GrpcMethods.model_ready,
        "ModelMetadata": GrpcMethods.metadata,
        "ModelConfig": GrpcMethods.config,
        "ModelStatistics": GrpcMethods.statistics,
        "RepositoryIndex": GrpcMethods.index,
        "RepositoryModelLoad": GrpcMethods.load,
        "RepositoryModelUnload": GrpcMethods.unload,
        "SystemSharedMemoryRegister": GrpcMethods.register,
        "SystemSharedMemoryUnregister": GrpcMethods.unregister,
        "SystemSharedMemoryStatus": GrpcMethods.regions,
    }.items()
}


STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
MAX_BODY_BYTES = 2**31 - 1  # Triton's limit; transports may have a lower one


class InProcessRelay:
    """The Relay of an engine in this process. Use on one event loop; long bodies are processed in threads."""

    def __init__(self, models: ServedModels, max_body_bytes: int) -> None:
        """max_body_bytes: after decompression."""
        self._http = HttpRoutes(models, max_body_bytes)
        self._grpc = GrpcMethods(models)

    async def send(self, call: Call[A], *, deadline: float | None) -> A:
        """See Engine. Cancellation also cancels the inference."""
        try:
            if isinstance(call, HttpCall):
                return cast(A, await self._http.answer(call, deadline))
            grpc_call = cast(GrpcCall, call)
            return cast(A, GrpcAnswer(0, await self._grpc.answer(grpc_call.method, grpc_call.message, deadline)))
        except ENGINE_ERRORS as error:
            return codec_of(call).encode_error(error)

    async def stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        """See Engine. The whole answer in one piece, because models here answer only once."""
        answer = await self.send(call, deadline=deadline)
        return HttpStream(answer.status, answer.headers, _single_chunk(answer.body))

    async def open_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> GrpcStream:
        """One response per request, in order. Raises NotSupported for methods without a stream."""
        if method != STREAM_INFER:
            raise NotSupported(f"an engine in the gateway's process has no {method.rpartition('/')[2]} that streams")
        return OrderedStream(lambda message: self._grpc.infer(message, deadline), deadline=deadline)


async def _single_chunk(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
