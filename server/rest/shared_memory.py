"""System and CUDA shared memory over REST: registered, unregistered, told of. Each client has its own regions."""

import base64
import binascii
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.core.errors import InvalidRequest
from server.dataplane import DataPlane, Verb
from server.rest.body import read_body
from server.rest.errors import json_response
from server.rest.gate import caller_of
from server.rest.limits import RestLimits
from server.rest.models import refused
from server.rest.routes import Row
from server.rest.schemas.engine import CudaRegion, SystemRegion
from server.shared_memory.region import HANDLE_BYTES, CudaWish, Kind, Region, SystemWish, Wish

T = TypeVar("T")
_PATHS = {Kind.SYSTEM: "/v2/systemsharedmemory", Kind.CUDA: "/v2/cudasharedmemory"}
_MAX_BODY_BYTES = 64 << 10
_NO_HANDLE = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"


class _System(msgspec.Struct):
    key: str | None = None
    byte_size: int | None = None
    offset: int = 0


class _Handle(msgspec.Struct):
    b64: str


class _Cuda(msgspec.Struct):
    raw_handle: _Handle | None = None
    byte_size: int | None = None
    device_id: int = 0


def shared_memory_rows(plane: DataPlane, limits: RestLimits) -> list[Row]:
    """The routes of both kinds; where no memory is shared, one each that says why."""
    sentence = plane.why_no_shared_memory
    if sentence:
        path = "{}[/region/{{region}}]/{{action}}"
        no = refused(sentence)
        return [Row(("GET", "POST"), path.format(_PATHS[kind]), no, "Shared memory: not served.") for kind in Kind]
    return [row for kind in Kind for row in SharedMemoryEndpoints(plane, limits, kind).rows()]


class SharedMemoryEndpoints:
    """The regions of one kind."""

    def __init__(self, plane: DataPlane, limits: RestLimits, kind: Kind) -> None:
        self._plane = plane
        self._limits = replace(limits, max_body_bytes=_MAX_BODY_BYTES)
        self._kind = kind

    def rows(self) -> list[Row]:
        """Status, register, unregister."""
        path = f"{_PATHS[self._kind]}[/region/{{region}}]"
        return [
            Row(("GET",), f"{path}/status", self.status, "The caller's shared memory regions."),
            Row(("POST",), f"{path}/register", self.register, "Share memory with the engine."),
            Row(("POST",), f"{path}/unregister", self.unregister, "Share it no more."),
        ]

    async def status(self, request: Request) -> Response:
        """A list, as Triton's; the caller's own regions only."""
        caller = caller_of(request)
        async with self._plane.shared_memory(Verb.READ, caller) as memory:
            return json_response([_told(region) for region in memory.status(self._kind, caller, _name_of(request))])

    async def register(self, request: Request) -> Response:
        """Runs to its end though the client may be gone."""
        name, caller = _name_of(request), caller_of(request)
        if not name:
            raise InvalidRequest(f"'region name' is necessary to register {self._kind} shared memory region")
        body = await read_body(request, self._limits)
        wish = _system_wish(name, body) if self._kind is Kind.SYSTEM else _cuda_wish(name, body)
        async with self._plane.shared_memory(Verb.SHARE, caller, name) as memory:
            await memory.register(wish, caller)
        return _done()

    async def unregister(self, request: Request) -> Response:
        """One region, or where none is named all of the caller's. The body, of which Triton reads nothing, is left."""
        name, caller = _name_of(request), caller_of(request)
        async with self._plane.shared_memory(Verb.UNSHARE, caller, name) as memory:
            unregister = partial(memory.unregister, name=name) if name else memory.unregister_own
            await unregister(self._kind, caller=caller)
        return _done()


def _done() -> Response:
    return Response(b"", media_type="application/json")


def _name_of(request: Request) -> str:
    return str(request.path_params.get("region", ""))


def _told(region: Region) -> SystemRegion | CudaRegion:
    wish = region.wish
    if isinstance(wish, SystemWish):
        return SystemRegion(wish.name, wish.key, wish.offset, wish.size_bytes)
    return CudaRegion(wish.name, wish.device_id, wish.size_bytes)


def _system_wish(name: str, body: bytes) -> Wish:
    asked = _document(body, _System)
    key = _given(asked.key, "key")
    return SystemWish(name, key, asked.offset, _given(asked.byte_size, "byte_size"))


def _cuda_wish(name: str, body: bytes) -> Wish:
    asked = _document(body, _Cuda)
    text = _given(asked.raw_handle, "raw_handle").b64
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(_NO_HANDLE) from error
    if len(handle) != HANDLE_BYTES:
        raise InvalidRequest(_NO_HANDLE)
    return CudaWish(name, handle, asked.device_id, _given(asked.byte_size, "byte_size"))


def _given(value: T | None, name: str) -> T:
    if value is None:
        raise InvalidRequest(f"Shared memory register request has no '{name}' field")
    return value


def _document(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error
