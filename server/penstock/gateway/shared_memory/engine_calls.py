"""Registers and unregisters regions at the engine over gRPC, for clients of either protocol."""

import time
from collections.abc import Callable

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from penstock.protocol.call import GrpcCall
from penstock.protocol.engine import Relay
from penstock.protocol.errors import (
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    NotSupported,
    RegionNotFound,
    RegionTaken,
)
from penstock.protocol.shared_memory import RegionKind, RegionSpec, SystemRegionSpec

ENGINE_CALL_TIMEOUT_S = 5.0
_SERVICE = "/inference.GRPCInferenceService/"
_ERRORS: dict[int, type[InferenceError]] = {
    3: InvalidRequest,
    5: RegionNotFound,
    6: RegionTaken,
    12: NotSupported,
    14: EngineUnavailable,
}
# The engine understood the call and rejected it.
ENGINE_REJECTIONS = (InvalidRequest, RegionTaken, RegionNotFound, NotSupported, EngineFailed)


async def register(relay: Relay, spec: RegionSpec) -> None:
    """Raises InferenceError with the engine's message."""
    if isinstance(spec, SystemRegionSpec):
        message = service_pb2.SystemSharedMemoryRegisterRequest(
            name=spec.name, key=spec.key, offset=spec.offset, byte_size=spec.size_bytes
        )
        await _call(relay, "SystemSharedMemoryRegister", message.SerializeToString())
        return
    message = service_pb2.CudaSharedMemoryRegisterRequest(
        name=spec.name, raw_handle=spec.raw_handle, device_id=spec.device_id, byte_size=spec.size_bytes
    )
    await _call(relay, "CudaSharedMemoryRegister", message.SerializeToString())


async def unregister(relay: Relay, kind: RegionKind, name: str) -> None:
    """Succeeds also if the engine does not know the name."""
    if not name:
        raise ValueError("an empty name would mean every client's regions")
    await _unregister(relay, kind, name)


async def system_regions(relay: Relay) -> list[str]:
    """Names of the system shared memory regions at the engine."""
    question = service_pb2.SystemSharedMemoryStatusRequest()
    answer = await _call(relay, "SystemSharedMemoryStatus", question.SerializeToString())
    try:
        return list(service_pb2.SystemSharedMemoryStatusResponse.FromString(answer).regions)
    except DecodeError as error:
        raise EngineFailed("the engine answered bytes that are no SystemSharedMemoryStatusResponse") from error


async def unregister_everything(relay: Relay, *, is_spared: Callable[[str], bool]) -> None:
    """Unregisters all regions except spared ones. Only for an engine that no other program uses."""
    for name in await system_regions(relay):
        if not is_spared(name):
            await _unregister(relay, RegionKind.SYSTEM, name)
    try:
        await _unregister(relay, RegionKind.CUDA, "")
    except NotSupported:  # an engine without GPUs
        return


async def _unregister(relay: Relay, kind: RegionKind, name: str) -> None:
    if kind is RegionKind.SYSTEM:
        message = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        await _call(relay, "SystemSharedMemoryUnregister", message.SerializeToString())
        return
    message = service_pb2.CudaSharedMemoryUnregisterRequest(name=name)
    await _call(relay, "CudaSharedMemoryUnregister", message.SerializeToString())


async def _call(relay: Relay, method: str, message: bytes) -> bytes:
    answer = await relay.send(GrpcCall(_SERVICE + method, message), deadline=time.monotonic() + ENGINE_CALL_TIMEOUT_S)
    if answer.code:
        raise _ERRORS.get(answer.code, EngineFailed)(answer.details or f"the engine answered code {answer.code}")
    return answer.message
