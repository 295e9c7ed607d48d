"""System and CUDA shared memory over gRPC: registered, unregistered, told of. Each client has its own regions."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from server.core.caller import Caller
from server.core.errors import InvalidRequest
from server.dataplane import DataPlane, Verb
from server.shared_memory.region import CudaWish, Kind, SystemWish, Wish

M = TypeVar("M", bound=Message)
Answer = Callable[[DataPlane, bytes, Caller], Awaitable[bytes]]


async def system_register(plane: DataPlane, message: bytes, caller: Caller) -> bytes:
    """Of a SystemSharedMemoryRegisterRequest. Raises of the InferenceError tree, as do all of these."""
    asked = _parsed(service_pb2.SystemSharedMemoryRegisterRequest, message)
    return await _register(plane, SystemWish(asked.name, asked.key, asked.offset, asked.byte_size), caller)


async def cuda_register(plane: DataPlane, message: bytes, caller: Caller) -> bytes:
    """Of a CudaSharedMemoryRegisterRequest."""
    asked = _parsed(service_pb2.CudaSharedMemoryRegisterRequest, message)
    return await _register(plane, CudaWish(asked.name, asked.raw_handle, asked.device_id, asked.byte_size), caller)


async def system_unregister(plane: DataPlane, message: bytes, caller: Caller) -> bytes:
    """One region, or where none is named all of the caller's."""
    asked = _parsed(service_pb2.SystemSharedMemoryUnregisterRequest, message)
    return await _unregister(plane, Kind.SYSTEM, asked.name, caller)


async def cuda_unregister(plane: DataPlane, message: bytes, caller: Caller) -> bytes:
    """One region, or where none is named all of the caller's."""
    asked = _parsed(service_pb2.CudaSharedMemoryUnregisterRequest, message)
    return await _unregister(plane, Kind.CUDA, asked.name, caller)


async def system_status(plane: DataPlane, message: bytes, caller: Caller) -> bytes:
    """The caller's regions, or one of them."""
    asked = _parsed(service_pb2.SystemSharedMemoryStatusRequest, message)
    answer = service_pb2.SystemSharedMemoryStatusResponse()
    async with plane.shared_memory(Verb.READ, caller) as memory:
        for region in memory.status(Kind.SYSTEM, caller, asked.name):
            told, wish = answer.regions[region.name], region.wish
            told.name, told.byte_size = wish.name, wish.size_bytes
            if isinstance(wish, SystemWish):
                told.key, told.offset = wish.key, wish.offset
    return _serialised(answer)


async def cuda_status(plane: DataPlane, message: bytes, caller: Caller) -> bytes:
    """The caller's regions, or one of them."""
    asked = _parsed(service_pb2.CudaSharedMemoryStatusRequest, message)
    answer = service_pb2.CudaSharedMemoryStatusResponse()
    async with plane.shared_memory(Verb.READ, caller) as memory:
        for region in memory.status(Kind.CUDA, caller, asked.name):
            told, wish = answer.regions[region.name], region.wish
            told.name, told.byte_size = wish.name, wish.size_bytes
            if isinstance(wish, CudaWish):
                told.device_id = wish.device_id
    return _serialised(answer)


METHODS: dict[str, Answer] = {
    "SystemSharedMemoryStatus": system_status,
    "SystemSharedMemoryRegister": system_register,
    "SystemSharedMemoryUnregister": system_unregister,
    "CudaSharedMemoryStatus": cuda_status,
    "CudaSharedMemoryRegister": cuda_register,
    "CudaSharedMemoryUnregister": cuda_unregister,
}


async def _register(plane: DataPlane, wish: Wish, caller: Caller) -> bytes:
    async with plane.shared_memory(Verb.SHARE, caller, wish.name) as memory:
        await memory.register(wish, caller)
    return b""


async def _unregister(plane: DataPlane, kind: Kind, name: str, caller: Caller) -> bytes:
    async with plane.shared_memory(Verb.UNSHARE, caller, name) as memory:
        if name:
            await memory.unregister(kind, name, caller)
        else:
            await memory.unregister_own(kind, caller)
    return b""


def _parsed(kind: type[M], message: bytes) -> M:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidRequest("the request is not a protobuf message of this method") from error


def _serialised(message: Message) -> bytes:
    serialised: bytes = message.SerializeToString()
    return serialised
