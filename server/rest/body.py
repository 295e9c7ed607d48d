"""Reading a request's body within its limits."""

import asyncio

from starlette.requests import Request
from starlette.types import Scope

from server.core.compression import NOT_ENCODED, inflate
from server.core.errors import BodyTooSlow, InvalidRequest, TooLarge
from server.core.gathering import Gathering
from server.rest.errors import ClientDisconnected
from server.rest.limits import RestLimits
from server.rest.presence import presence_of

_THREAD_FROM_BYTES = 4 << 10  # a thousand times as much may be in it


async def read_body(request: Request, limits: RestLimits) -> bytes:
    """The whole body as it was sent.

    Raises TooLarge at the limit (by Content-Length before a byte is read), BodyTooSlow at the receive deadline,
    ClientDisconnected.
    """
    _refuse_declared(request, limits.max_body_bytes)
    presence = presence_of(request.scope)
    if presence is not None and presence.is_whole:
        return await _receive(request, limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _receive(request, limits.max_body_bytes)
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not arrive within {limits.body_timeout_s:g} s; send it faster") from error


async def decompressed(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body by its content-encoding, in a thread where it is long. Raises what `inflate` does."""
    if encoding in NOT_ENCODED or len(body) < _THREAD_FROM_BYTES:
        return inflate(body, encoding, limit_bytes)
    return await asyncio.to_thread(inflate, body, encoding, limit_bytes)


def single_header(request: Request, name: str) -> str:
    """The header's value, empty where it is absent. See header_if_given."""
    return header_if_given(request, name) or ""


def header_if_given(request: Request, name: str) -> str | None:
    """The header's value, None where it is absent. name: in lower case. Raises InvalidRequest where it stands twice."""
    wanted = name.encode()
    values = [pair[1] for pair in request.scope["headers"] if pair[0] == wanted]
    if len(values) > 1:
        raise InvalidRequest(f"the header {name} is given {len(values)} times; give it once")
    return values[0].decode("latin-1").strip() if values else None


def first_header(scope: Scope, name: bytes) -> bytes:
    """The header's value, the first where it stands twice, empty where it is absent. name: in lower case."""
    for known, value in scope["headers"]:
        if known == name:
            return bytes(value)
    return b""


def _refuse_declared(request: Request, limit_bytes: int) -> None:
    declared = first_header(request.scope, b"content-length")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise TooLarge(f"the body has {int(declared)} bytes (limit {limit_bytes}); send less at once")


async def _receive(request: Request, limit_bytes: int) -> bytes:
    received = Gathering()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        if received.size_bytes + len(chunk) > limit_bytes:
            raise TooLarge(f"the body has more than {limit_bytes} bytes, the limit; send less at once")
        received.add(chunk)
        if not message.get("more_body", False):
            return received.take()
