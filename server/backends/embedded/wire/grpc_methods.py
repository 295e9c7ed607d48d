"""GRPCInferenceService, answered by the embedded engine."""

from collections.abc import Awaitable, Callable, Mapping

from tritonclient.grpc import service_pb2

from server import VERSION
from server.backends.embedded.engine import EmbeddedEngine
from server.backends.embedded.model import version_number
from server.backends.embedded.wire.inference import (
    CONFIG,
    infer,
    refuse_load_parameter,
    refuse_repository,
    response_bytes,
)
from server.backends.embedded.wire.server_metadata import EXTENSIONS, NAME, NO_LOG_SETTINGS, NO_TRACE_SETTINGS
from server.backends.wire.grpc_messages import (
    encode_response,
    index_message,
    metadata_message,
    parsed_request,
    read_infer,
    serialised,
)
from server.backends.wire.threads import in_thread
from server.core.errors import InvalidRequest, ModelNotReady, NotSupported

Answer = Callable[["GrpcMethods", bytes, float | None], Awaitable[bytes]]


class GrpcMethods:
    """One engine's gRPC side: a serialised message in, one out. Raises of the InferenceError tree."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def answer(self, method: str, message: bytes, deadline: float | None) -> bytes:
        """method: the path. Raises NotSupported for those that this engine has not."""
        handle = _METHODS.get(method)
        if handle is None:
            name = method.rpartition("/")[2]
            raise NotSupported(_NOT_HERE.get(name, f"the embedded engine has no {name}"))
        return await handle(self, message, deadline)

    async def infer(self, message: bytes, deadline: float | None) -> bytes:
        request = await in_thread(len(message), parsed_request, service_pb2.ModelInferRequest, message)
        model, version = request.model_name, request.model_version
        self._engine.labels(model, version, "")  # a model that is not there is told first
        ask = await in_thread(len(message), read_infer, request)
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
            told = answer.regions[region.name]
            told.name, told.key, told.offset, told.byte_size = region.name, region.key, region.offset, region.size_bytes
        return serialised(answer)

    async def unload(self, message: bytes, _: float | None) -> bytes:
        request = parsed_request(service_pb2.RepositoryModelUnloadRequest, message)
        refuse_repository(request.repository_name)
        dependents = request.parameters.get("unload_dependents")
        if dependents is not None and dependents.WhichOneof("parameter_choice") != "bool_param":
            raise InvalidRequest("invalid value type for 'unload_dependents' parameter, expected bool_param.")
        await self._engine.unload(request.model_name)
        return b""


_NOT_HERE = {"TraceSetting": NO_TRACE_SETTINGS, "LogSettings": NO_LOG_SETTINGS}


def _config(parameters: "Mapping[str, service_pb2.ModelRepositoryParameter]") -> str | None:
    if CONFIG not in parameters:
        return None
    if parameters[CONFIG].WhichOneof("parameter_choice") != "string_param":
        raise InvalidRequest("invalid value type for load parameter 'config', expected string_param.")
    text: str = parameters[CONFIG].string_param
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
