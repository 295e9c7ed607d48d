"""What the engine is told of regions: GRPCInferenceService's calls, whichever protocol the client spoke."""

import time
from collections.abc import Callable

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from server.core.backend import Relay
from server.core.errors import (
    BackendFailed,
    BackendUnavailable,
    InferenceError,
    InvalidRequest,
    NotSupported,
    RegionNotFound,
    RegionTaken,
)
from server.core.relay import GrpcCall
from server.shared_memory.region import Kind, SystemWish, Wish

PATIENCE_S = 5.0
_SERVICE = "/inference.GRPCInferenceService/"
_ERRORS: dict[int, type[InferenceError]] = {
    3: InvalidRequest,
    5: RegionNotFound,
    6: RegionTaken,
    12: NotSupported,
    14: BackendUnavailable,
}
# The engine understood, and did not do it.
SAID_NO = (InvalidRequest, RegionTaken, RegionNotFound, NotSupported, BackendFailed)


async def register(relay: Relay, wish: Wish) -> None:
    """Raises of the InferenceError tree, in the engine's words."""
    if isinstance(wish, SystemWish):
        message = service_pb2.SystemSharedMemoryRegisterRequest(
            name=wish.name, key=wish.key, offset=wish.offset, byte_size=wish.size_bytes
        )
        await _call(relay, "SystemSharedMemoryRegister", message.SerializeToString())
        return
    message = service_pb2.CudaSharedMemoryRegisterRequest(
        name=wish.name, raw_handle=wish.raw_handle, device_id=wish.device_id, byte_size=wish.size_bytes
    )
    await _call(relay, "CudaSharedMemoryRegister", message.SerializeToString())


async def unregister(relay: Relay, kind: Kind, name: str) -> None:
    """No error where the engine does not know the name."""
    if not name:
        raise ValueError("an empty name would mean every client's regions")
    await _unregister(relay, kind, name)


async def system_regions(relay: Relay) -> list[str]:
    """The names of the regions of this machine's memory that the engine knows."""
    question = service_pb2.SystemSharedMemoryStatusRequest()
    answer = await _call(relay, "SystemSharedMemoryStatus", question.SerializeToString())
    try:
        return list(service_pb2.SystemSharedMemoryStatusResponse.FromString(answer).regions)
    except DecodeError as error:
        raise BackendFailed("the engine answered bytes that are no SystemSharedMemoryStatusResponse") from error


async def unregister_everything(relay: Relay, *, is_spared: Callable[[str], bool]) -> None:
    """Every region but the spared, whoever registered it: for an engine that is ours alone."""
    for name in await system_regions(relay):
        if not is_spared(name):
            await _unregister(relay, Kind.SYSTEM, name)
    try:
        await _unregister(relay, Kind.CUDA, "")
    except NotSupported:  # an engine without GPUs
        return


async def _unregister(relay: Relay, kind: Kind, name: str) -> None:
    if kind is Kind.SYSTEM:
        message = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        await _call(relay, "SystemSharedMemoryUnregister", message.SerializeToString())
        return
    message = service_pb2.CudaSharedMemoryUnregisterRequest(name=name)
    await _call(relay, "CudaSharedMemoryUnregister", message.SerializeToString())


async def _call(relay: Relay, method: str, message: bytes) -> bytes:
    """The answer's message."""
    answer = await relay.grpc(GrpcCall(_SERVICE + method, message), deadline=time.monotonic() + PATIENCE_S)
    if answer.code:
        raise _ERRORS.get(answer.code, BackendFailed)(answer.details or f"the engine answered code {answer.code}")
    return answer.message
