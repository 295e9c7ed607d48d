"""GRPCInferenceService, method by method: relayed, answered here, or rejected; with a trace for each call."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from penstock.gateway.dataplane import DataPlane
from penstock.gateway.grpc.forwarding import GrpcForwarder, StreamForwarder
from penstock.gateway.grpc.interceptors import caller_of
from penstock.gateway.grpc.relay import CallRelay, Context
from penstock.gateway.grpc.stream import StreamRelay
from penstock.gateway.tracing import PARENT_HEADERS, Tracer, current_trace
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.protocol.call import GRPC_FAULTS, GrpcAnswer
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.grpc_codec import (
    changes_settings,
    read_model_name,
    read_repository_model_name,
    read_settings_model_name,
    unblocked_metadata,
)
from penstock.protocol.grpc_inference import serialised
from penstock.protocol.identity import Identity, Verb
from penstock.protocol.shared_memory import CudaRegionSpec, RegionKind, RegionSpec, SystemRegionSpec

_PROTOCOL = "grpc"
_PROBES = ("ServerLive", "ServerReady", "ModelReady")
_CANCELLED, _UNKNOWN = 1, 2

TracedMethod = Callable[[bytes, "grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[bytes]]


def traced(tracer: Tracer, name: str, method: TracedMethod) -> TracedMethod:
    """The method with a trace around each call, under the client's traceparent. Probes are not traced."""
    if name in _PROBES:
        return method

    async def serve(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        parents = [
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if key in PARENT_HEADERS and isinstance(value, str)
        ]
        trace = tracer.begin(parents, _PROTOCOL)
        current_trace.set(trace)  # of this call's task
        code = _UNKNOWN
        try:
            answer = await method(message, context)
            code = 0
            return answer
        except asyncio.CancelledError:
            code = _CANCELLED
            raise
        except grpc.aio.AbortError:
            code = _code_of(context)
            raise
        finally:
            trace.end(name, code=code, is_error=code in GRPC_FAULTS)

    return serve


def _code_of(context: "grpc.aio.ServicerContext[bytes, bytes]") -> int:
    """The number of the call's status; gRPC stores the number or the enum."""
    code = context.code()
    number: int = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return number


M = TypeVar("M", bound=Message)
SharedMemoryMethod = Callable[[DataPlane, bytes, Identity], Awaitable[bytes]]


async def system_register(plane: DataPlane, message: bytes, caller: Identity) -> bytes:
    """Handles a SystemSharedMemoryRegisterRequest. Raises InferenceError, as do all of these."""
    asked = _parsed(service_pb2.SystemSharedMemoryRegisterRequest, message)
    return await _register(plane, SystemRegionSpec(asked.name, asked.key, asked.offset, asked.byte_size), caller)


async def cuda_register(plane: DataPlane, message: bytes, caller: Identity) -> bytes:
    """Handles a CudaSharedMemoryRegisterRequest."""
    asked = _parsed(service_pb2.CudaSharedMemoryRegisterRequest, message)
    return await _register(
        plane, CudaRegionSpec(asked.name, asked.raw_handle, asked.device_id, asked.byte_size), caller
    )


async def _unregister(
    kind: RegionKind, request_type: type[Message], plane: DataPlane, message: bytes, caller: Identity
) -> bytes:
    """Unregisters one region, or all of the client's if none is named."""
    name: str = _parsed(request_type, message).name  # type: ignore[attr-defined]
    async with plane.shared_memory(Verb.UNSHARE, caller, name) as memory:
        await memory.unregister(kind, name, caller)
    return b""


async def _status(
    kind: RegionKind, types: tuple[type[Message], type[Message]], plane: DataPlane, message: bytes, caller: Identity
) -> bytes:
    """The client's regions, or one of them. types: of the request and the response."""
    request_type, answer_type = types
    name: str = _parsed(request_type, message).name  # type: ignore[attr-defined]
    answer: Any = answer_type()
    async with plane.shared_memory(Verb.READ, caller) as memory:
        for region in memory.status(kind, caller, name):
            row, wish = answer.regions[region.name], region.wish
            row.name, row.byte_size = wish.name, wish.size_bytes
            if isinstance(wish, SystemRegionSpec):
                row.key, row.offset = wish.key, wish.offset
            else:
                row.device_id = wish.device_id
    return serialised(answer)


_SYSTEM, _CUDA = RegionKind.SYSTEM, RegionKind.CUDA
SHARED_MEMORY_METHODS: dict[str, SharedMemoryMethod] = {
    "SystemSharedMemoryStatus": partial(
        _status, _SYSTEM, (service_pb2.SystemSharedMemoryStatusRequest, service_pb2.SystemSharedMemoryStatusResponse)
    ),
    "SystemSharedMemoryRegister": system_register,
    "SystemSharedMemoryUnregister": partial(_unregister, _SYSTEM, service_pb2.SystemSharedMemoryUnregisterRequest),
    "CudaSharedMemoryStatus": partial(
        _status, _CUDA, (service_pb2.CudaSharedMemoryStatusRequest, service_pb2.CudaSharedMemoryStatusResponse)
    ),
    "CudaSharedMemoryRegister": cuda_register,
    "CudaSharedMemoryUnregister": partial(_unregister, _CUDA, service_pb2.CudaSharedMemoryUnregisterRequest),
}


async def _register(plane: DataPlane, wish: RegionSpec, caller: Identity) -> bytes:
    async with plane.shared_memory(Verb.SHARE, caller, wish.name) as memory:
        await memory.register(wish, caller)
    return b""


def _parsed(kind: type[M], message: bytes) -> M:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidRequest("the request is not a protobuf message of this method") from error


INFERENCE_SERVICE = "inference.GRPCInferenceService"

Method = Callable[[bytes, Context], Awaitable[bytes]]

_READS = {
    "ModelReady": Verb.READY,
    "ModelMetadata": Verb.READ,
    "ModelConfig": Verb.CONFIG,
    "ModelStatistics": Verb.READ,
}
_CHANGES = {"RepositoryModelLoad": Verb.LOAD, "RepositoryModelUnload": Verb.UNLOAD}
_SETTINGS = ("TraceSetting", "LogSettings")


def worker_handlers(
    plane: DataPlane, relay: CallRelay, streams: StreamForwarder, core: CoreRelay
) -> "grpc.GenericRpcHandler[bytes, bytes]":
    """The service's methods in a worker: inference and health are served here, everything else is forwarded."""
    names = ["ServerMetadata", "RepositoryIndex", *_READS, *_CHANGES, *_SETTINGS, *SHARED_MEMORY_METHODS]
    passed_on = GrpcForwarder(core, relay)
    methods: dict[str, Method] = {name: partial(passed_on.call, f"/{INFERENCE_SERVICE}/{name}") for name in names}
    methods |= {
        "ServerLive": _server_live,
        "ServerReady": partial(_server_ready, plane),
        "ModelInfer": partial(relay.infer, f"/{INFERENCE_SERVICE}/ModelInfer"),
    }
    return _handlers(plane, methods, streams)


def inference_handlers(
    plane: DataPlane, relay: CallRelay, streams: StreamRelay
) -> "grpc.GenericRpcHandler[bytes, bytes]":
    """The service's methods over raw bytes."""
    methods: dict[str, Method] = {
        "ServerLive": _server_live,
        "ServerReady": partial(_server_ready, plane),
        "ServerMetadata": partial(_server_metadata, plane, relay),
        "RepositoryIndex": partial(_relayed, relay, Verb.INDEX, "RepositoryIndex", _no_model),
        "ModelInfer": partial(relay.infer, f"/{INFERENCE_SERVICE}/ModelInfer"),
    }
    methods |= {name: partial(_relayed, relay, verb, name, read_model_name) for name, verb in _READS.items()}
    methods |= {
        name: partial(_relayed, relay, verb, name, read_repository_model_name) for name, verb in _CHANGES.items()
    }
    methods |= {name: partial(_settings, relay, name) for name in _SETTINGS}
    methods |= {
        name: partial(_shared_memory_call, plane, relay, answer) for name, answer in SHARED_MEMORY_METHODS.items()
    }
    return _handlers(plane, methods, streams)


def _handlers(
    plane: DataPlane, methods: dict[str, Method], streams: StreamRelay | StreamForwarder
) -> "grpc.GenericRpcHandler[bytes, bytes]":
    if plane.tracer is not None:
        methods = {name: traced(plane.tracer, name, method) for name, method in methods.items()}
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        partial(streams.serve, f"/{INFERENCE_SERVICE}/ModelStreamInfer")
    )
    return grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers)


async def _server_live(_: bytes, __: Context) -> bytes:
    return serialised(service_pb2.ServerLiveResponse(live=True))


async def _server_ready(plane: DataPlane, _: bytes, __: Context) -> bytes:
    return serialised(service_pb2.ServerReadyResponse(ready=plane.readiness().is_ready))


async def _server_metadata(plane: DataPlane, relay: CallRelay, message: bytes, context: Context) -> bytes:
    answer = await _relayed(relay, Verb.READ, "ServerMetadata", _no_model, message, context)
    return unblocked_metadata(answer, plane.blocked_extensions)


async def _relayed(
    relay: CallRelay, verb: Verb, name: str, model_of: Callable[[bytes], str], message: bytes, context: Context
) -> bytes:
    return await relay.pass_on(verb, f"/{INFERENCE_SERVICE}/{name}", message, model_of, context)


async def _settings(relay: CallRelay, name: str, message: bytes, context: Context) -> bytes:
    """One method reads and changes settings; the message shows which."""
    verb = Verb.CONFIGURE if changes_settings(message) else Verb.READ
    return await _relayed(relay, verb, name, read_settings_model_name, message, context)


async def _shared_memory_call(
    plane: DataPlane, relay: CallRelay, answer: SharedMemoryMethod, message: bytes, context: Context
) -> bytes:
    async def work() -> GrpcAnswer:
        return GrpcAnswer(0, await answer(plane, message, caller_of(context)))

    return await relay.answer(work, context)


def _no_model(_: bytes) -> str:
    return ""
