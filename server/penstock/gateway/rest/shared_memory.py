"""System and CUDA shared memory over HTTP: register, unregister, status. Each client sees its own regions."""

import base64
import binascii
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.rest.openapi import ERRORS, RECEIVE_ERRORS, json_body, operation
from penstock.gateway.rest.request import read_body
from penstock.gateway.rest.routes import Limits, Plane, caller_of
from penstock.gateway.rest.schemas import CudaRegion, CudaRegister, SystemRegion, SystemRegister
from penstock.protocol.errors import InvalidRequest, NotSupported
from penstock.protocol.identity import Role, Verb
from penstock.protocol.shared_memory import (
    HANDLE_BYTES,
    CudaRegionSpec,
    Region,
    RegionKind,
    RegionSpec,
    SystemRegionSpec,
)

T = TypeVar("T")
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


async def _is_on(plane: Plane) -> None:
    """Not a dependency of the routes: a worker forwards these, and knows only their roles."""
    if plane.why_no_shared_memory:
        raise NotSupported(plane.why_no_shared_memory)


_On = Annotated[None, Depends(_is_on)]


async def status(request: Request, plane: Plane, _: _On) -> list[SystemRegion | CudaRegion]:
    """The caller's shared memory regions.

    The caller's own regions.
    """
    caller = caller_of(request)
    async with plane.shared_memory(Verb.READ, caller) as memory:
        return [_region_body(region) for region in memory.status(_kind_of(request), caller, _name_of(request))]


async def register(request: Request, plane: Plane, limits: Limits, _: _On) -> Response:
    """Share memory with the engine.

    Registers a region under a name, for the inputs and outputs of the caller's requests.
    """
    kind, name, caller = _kind_of(request), _name_of(request), caller_of(request)
    if not name:
        raise InvalidRequest(f"'region name' is necessary to register {kind} shared memory region")
    body = await read_body(request, replace(limits, max_body_bytes=_MAX_BODY_BYTES))
    wish = _system_wish(name, body) if kind is RegionKind.SYSTEM else _cuda_wish(name, body)
    async with plane.shared_memory(Verb.SHARE, caller, name) as memory:
        await memory.register(wish, caller)  # to its end, though the client may be gone
    return _empty_response()


async def unregister(request: Request, plane: Plane, _: _On) -> Response:
    """Share it no more.

    One of the caller's regions, or all of them. Other clients' regions are not affected.
    """
    # The body, of which Triton reads nothing, is left unread.
    name, caller = _name_of(request), caller_of(request)
    async with plane.shared_memory(Verb.UNSHARE, caller, name) as memory:
        await memory.unregister(_kind_of(request), name, caller)
    return _empty_response()


router = APIRouter(tags=["shared memory"], responses=ERRORS)


def _declare(kind: RegionKind, answer: type, wish: type) -> None:
    path = f"/v2/{kind}sharedmemory"
    region = f"{path}/region/{{region}}"
    common: dict[str, Any] = {"extension": f"{kind}_shared_memory"}
    change: dict[str, Any] = {"role": Role.ADMIN, "response_class": Response, "responses": RECEIVE_ERRORS, **common}
    paths, name = (f"{path}/status", f"{region}/status"), f"{kind}RegionStatus"
    operation(router, "GET", *paths, name=name, role=Role.READ, response_model=list[answer], **common)(status)  # type: ignore[valid-type]
    name = f"{kind}RegionRegister"
    hidden = (f"{path}/register",)  # always refused: it names no region
    operation(router, "POST", f"{region}/register", name=name, body=json_body(wish), hidden=hidden, **change)(register)
    paths, name = (f"{path}/unregister", f"{region}/unregister"), f"{kind}RegionUnregister"
    operation(router, "POST", *paths, name=name, **change)(unregister)


_declare(RegionKind.SYSTEM, SystemRegion, SystemRegister)
_declare(RegionKind.CUDA, CudaRegion, CudaRegister)


def _kind_of(request: Request) -> RegionKind:
    return RegionKind(request.scope["path"].removeprefix("/v2/").partition("sharedmemory")[0])


def _empty_response() -> Response:
    return Response(b"", media_type="application/json")


def _name_of(request: Request) -> str:
    return str(request.path_params.get("region", ""))


def _region_body(region: Region) -> SystemRegion | CudaRegion:
    wish = region.wish
    if isinstance(wish, SystemRegionSpec):
        return SystemRegion(name=wish.name, key=wish.key, offset=wish.offset, byte_size=wish.size_bytes)
    return CudaRegion(name=wish.name, device_id=wish.device_id, byte_size=wish.size_bytes)


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
