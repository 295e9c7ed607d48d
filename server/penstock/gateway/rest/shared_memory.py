"""System and CUDA shared memory over HTTP: register, unregister, status. Each client sees its own regions."""

import base64
import binascii
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.dataplane import DataPlane
from penstock.gateway.rest.limits import RestLimits
from penstock.gateway.rest.models import not_served
from penstock.gateway.rest.request import read_body
from penstock.gateway.rest.responses import json_response
from penstock.gateway.rest.routes import RouteSpec, caller_of
from penstock.gateway.rest.schemas import CudaRegion, SystemRegion
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.identity import Verb
from penstock.protocol.shared_memory import (
    HANDLE_BYTES,
    CudaRegionSpec,
    Region,
    RegionKind,
    RegionSpec,
    SystemRegionSpec,
)

T = TypeVar("T")
_PATHS = {RegionKind.SYSTEM: "/v2/systemsharedmemory", RegionKind.CUDA: "/v2/cudasharedmemory"}
_MAX_BODY_BYTES = 64 << 10
_NO_HANDLE = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"


class _SystemRegisterBody(msgspec.Struct):
    key: str | None = None
    byte_size: int | None = None
    offset: int = 0


class _CudaHandleBody(msgspec.Struct):
    b64: str


class _CudaRegisterBody(msgspec.Struct):
    raw_handle: _CudaHandleBody | None = None
    byte_size: int | None = None
    device_id: int = 0


def shared_memory_rows(plane: DataPlane, limits: RestLimits) -> list[RouteSpec]:
    """The routes of both kinds; where no memory is shared, one each that says why."""
    sentence = plane.why_no_shared_memory
    if sentence:
        path = "{}[/region/{{region}}]/{{action}}"
        no = not_served(sentence)
        return [
            RouteSpec(("GET", "POST"), path.format(_PATHS[kind]), no, "Shared memory: not served.")
            for kind in RegionKind
        ]
    return [row for kind in RegionKind for row in SharedMemoryEndpoints(plane, limits, kind).rows()]


class SharedMemoryEndpoints:
    """The regions of one kind."""

    def __init__(self, plane: DataPlane, limits: RestLimits, kind: RegionKind) -> None:
        self._plane = plane
        self._limits = replace(limits, max_body_bytes=_MAX_BODY_BYTES)
        self._kind = kind

    def rows(self) -> list[RouteSpec]:
        """Status, register, unregister."""
        path = f"{_PATHS[self._kind]}[/region/{{region}}]"
        return [
            RouteSpec(("GET",), f"{path}/status", self.status, "The caller's shared memory regions."),
            RouteSpec(("POST",), f"{path}/register", self.register, "Share memory with the engine."),
            RouteSpec(("POST",), f"{path}/unregister", self.unregister, "Share it no more."),
        ]

    async def status(self, request: Request) -> Response:
        """A list, as Triton's; the caller's own regions only."""
        caller = caller_of(request)
        async with self._plane.shared_memory(Verb.READ, caller) as memory:
            return json_response(
                [_region_body(region) for region in memory.status(self._kind, caller, _name_of(request))]
            )

    async def register(self, request: Request) -> Response:
        """Runs to its end though the client may be gone."""
        name, caller = _name_of(request), caller_of(request)
        if not name:
            raise InvalidRequest(f"'region name' is necessary to register {self._kind} shared memory region")
        body = await read_body(request, self._limits)
        wish = _system_wish(name, body) if self._kind is RegionKind.SYSTEM else _cuda_wish(name, body)
        async with self._plane.shared_memory(Verb.SHARE, caller, name) as memory:
            await memory.register(wish, caller)
        return _empty_response()

    async def unregister(self, request: Request) -> Response:
        """One region, or where none is named all of the caller's. The body, of which Triton reads nothing, is left."""
        name, caller = _name_of(request), caller_of(request)
        async with self._plane.shared_memory(Verb.UNSHARE, caller, name) as memory:
            unregister = partial(memory.unregister, name=name) if name else memory.unregister_own
            await unregister(self._kind, caller=caller)
        return _empty_response()


def _empty_response() -> Response:
    return Response(b"", media_type="application/json")


def _name_of(request: Request) -> str:
    return str(request.path_params.get("region", ""))


def _region_body(region: Region) -> SystemRegion | CudaRegion:
    wish = region.wish
    if isinstance(wish, SystemRegionSpec):
        return SystemRegion(wish.name, wish.key, wish.offset, wish.size_bytes)
    return CudaRegion(wish.name, wish.device_id, wish.size_bytes)


def _system_wish(name: str, body: bytes) -> RegionSpec:
    asked = _document(body, _SystemRegisterBody)
    key = _required(asked.key, "key")
    return SystemRegionSpec(name, key, asked.offset, _required(asked.byte_size, "byte_size"))


def _cuda_wish(name: str, body: bytes) -> RegionSpec:
    asked = _document(body, _CudaRegisterBody)
    text = _required(asked.raw_handle, "raw_handle").b64
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(_NO_HANDLE) from error
    if len(handle) != HANDLE_BYTES:
        raise InvalidRequest(_NO_HANDLE)
    return CudaRegionSpec(name, handle, asked.device_id, _required(asked.byte_size, "byte_size"))


def _required(value: T | None, name: str) -> T:
    if value is None:
        raise InvalidRequest(f"Shared memory register request has no '{name}' field")
    return value


def _document(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error
