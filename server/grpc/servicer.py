"""GRPCInferenceService, method by method: relayed, answered here, or refused with a sentence."""

from collections.abc import Awaitable, Callable
from functools import partial

import grpc
from tritonclient.grpc import service_pb2

from server.backends.core_relay import CoreRelay
from server.core.model import UNMERGED
from server.core.relay import GrpcAnswer
from server.dataplane import DataPlane, Verb
from server.grpc import shared_memory
from server.grpc.codec import (
    changes_settings,
    scan_model_name,
    scan_repository_request,
    scan_settings,
    unblocked_metadata,
)
from server.grpc.gate import caller_of
from server.grpc.passed_on import PassedOn, PassedStreams
from server.grpc.relay import CallRelay, Context
from server.grpc.stream import StreamRelay
from server.grpc.trace import traced
from server.grpc.unserved import index_with_refusals

SERVICE = "inference.GRPCInferenceService"

Method = Callable[[bytes, Context], Awaitable[bytes]]

_READS = {
    "ModelReady": scan_model_name,
    "ModelMetadata": scan_model_name,
    "ModelConfig": scan_model_name,
    "ModelStatistics": scan_model_name,
}
_CHANGES = {"RepositoryModelLoad": Verb.LOAD, "RepositoryModelUnload": Verb.UNLOAD}
_SETTINGS = ("TraceSetting", "LogSettings")


def front_handlers(
    plane: DataPlane, relay: CallRelay, streams: PassedStreams, core: CoreRelay
) -> "grpc.GenericRpcHandler[bytes, bytes]":
    """The service's methods as a front has them: inference and health served here, everything else passed on."""
    names = ["ServerMetadata", "RepositoryIndex", *_READS, *_CHANGES, *_SETTINGS, *shared_memory.METHODS]
    passed_on = PassedOn(core, relay)
    methods: dict[str, Method] = {name: partial(passed_on.call, f"/{SERVICE}/{name}") for name in names}
    methods |= {
        "ServerLive": _server_live,
        "ServerReady": partial(_server_ready, plane),
        "ModelInfer": partial(relay.infer, f"/{SERVICE}/ModelInfer"),
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
        "RepositoryIndex": partial(_repository_index, plane, relay),
        "ModelInfer": partial(relay.infer, f"/{SERVICE}/ModelInfer"),
    }
    methods |= {name: partial(_relayed, relay, Verb.READ, name, model_of) for name, model_of in _READS.items()}
    methods["ModelReady"] = partial(_model_ready, plane, relay)
    methods["ModelConfig"] = partial(_model_config, plane, relay)
    methods |= {name: partial(_relayed, relay, verb, name, scan_repository_request) for name, verb in _CHANGES.items()}
    methods |= {name: partial(_settings, relay, name) for name in _SETTINGS}
    methods |= {name: partial(_about_memory, plane, relay, answer) for name, answer in shared_memory.METHODS.items()}
    return _handlers(plane, methods, streams)


def _handlers(
    plane: DataPlane, methods: dict[str, Method], streams: StreamRelay | PassedStreams
) -> "grpc.GenericRpcHandler[bytes, bytes]":
    if plane.tracer is not None:
        methods = {name: traced(plane.tracer, name, method) for name, method in methods.items()}
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        partial(streams.serve, f"/{SERVICE}/ModelStreamInfer")
    )
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


async def _server_live(_: bytes, __: Context) -> bytes:
    """Live as long as it can say so."""
    return _serialised(service_pb2.ServerLiveResponse(live=True))


async def _server_ready(plane: DataPlane, _: bytes, __: Context) -> bytes:
    return _serialised(service_pb2.ServerReadyResponse(ready=plane.readiness().is_ready))


async def _server_metadata(plane: DataPlane, relay: CallRelay, message: bytes, context: Context) -> bytes:
    answer = await _relayed(relay, Verb.READ, "ServerMetadata", _no_model, message, context)
    return unblocked_metadata(answer, plane.blocked_extensions)


async def _repository_index(plane: DataPlane, relay: CallRelay, message: bytes, context: Context) -> bytes:
    answer = await _relayed(relay, Verb.READ, "RepositoryIndex", _no_model, message, context)
    return index_with_refusals(answer, message, plane.refusals())


async def _model_ready(plane: DataPlane, relay: CallRelay, message: bytes, context: Context) -> bytes:
    answer = await _relayed(relay, Verb.READ, "ModelReady", scan_model_name, message, context)
    is_refused = scan_model_name(message) in plane.refusals()
    return _serialised(service_pb2.ModelReadyResponse(ready=False)) if is_refused else answer


async def _model_config(plane: DataPlane, relay: CallRelay, message: bytes, context: Context) -> bytes:
    answer = await _relayed(relay, Verb.READ, "ModelConfig", scan_model_name, message, context)
    unmerged = plane.batch_options(scan_model_name(message)).unmerged
    if not unmerged:
        return answer
    response = service_pb2.ModelConfigResponse.FromString(answer)
    response.config.parameters[UNMERGED].string_value = unmerged
    return _serialised(response)


async def _relayed(
    relay: CallRelay, verb: Verb, name: str, model_of: Callable[[bytes], str], message: bytes, context: Context
) -> bytes:
    return await relay.pass_on(verb, f"/{SERVICE}/{name}", message, model_of, context)


async def _settings(relay: CallRelay, name: str, message: bytes, context: Context) -> bytes:
    """One method reads and changes them: which of the two it is, the message says."""
    verb = Verb.CONFIGURE if changes_settings(message) else Verb.READ
    return await _relayed(relay, verb, name, scan_settings, message, context)


async def _about_memory(
    plane: DataPlane, relay: CallRelay, answer: shared_memory.Answer, message: bytes, context: Context
) -> bytes:
    async def work() -> GrpcAnswer:
        return GrpcAnswer(0, await answer(plane, message, caller_of(context)))

    return await relay.answer(work, context)


def _no_model(_: bytes) -> str:
    return ""


def _serialised(
    message: "service_pb2.ServerLiveResponse | service_pb2.ServerReadyResponse | service_pb2.ModelReadyResponse"
    " | service_pb2.ModelConfigResponse",
) -> bytes:
    serialised: bytes = message.SerializeToString()
    return serialised
