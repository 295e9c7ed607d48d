"""Reading a request's body within its limits."""

import asyncio
import zlib

from starlette.requests import Request

from server.core.errors import BodyTooSlow, InvalidRequest, NotSupported, TooLarge
from server.rest.errors import ClientDisconnected
from server.rest.limits import RestLimits

_GZIP_OR_ZLIB = 47  # zlib's wbits: either header, told apart by its first bytes, as Triton does
_THREAD_FROM_BYTES = 64 << 10


async def read_body(request: Request, limits: RestLimits) -> bytes:
    """The whole body as it was sent.

    Raises TooLarge at the limit (by Content-Length before a byte is read), BodyTooSlow at the receive deadline,
    ClientDisconnected.
    """
    _refuse_declared(request, limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _receive(request, limits.max_body_bytes)
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not arrive within {limits.body_timeout_s:g} s; send it faster") from error


async def decompressed(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body by its content-encoding; the body itself where there is none.

    Raises TooLarge at the limit of decompressed bytes, InvalidRequest for broken data, NotSupported for an
    encoding that is neither gzip nor deflate (zlib's form).
    """
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise NotSupported(f"content-encoding {encoding!r} is not supported; send gzip, deflate or none")
    if len(body) < _THREAD_FROM_BYTES:
        return _inflate(body, encoding, limit_bytes)
    return await asyncio.to_thread(_inflate, body, encoding, limit_bytes)


def single_header(request: Request, name: str) -> str:
    """The header's value, empty where it is absent. Raises InvalidRequest where it stands twice."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(f"the header {name} is given {len(values)} times; give it once")
    return values[0].strip() if values else ""


def _refuse_declared(request: Request, limit_bytes: int) -> None:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise TooLarge(f"the body has {declared} bytes (limit {limit_bytes}); send less at once")


async def _receive(request: Request, limit_bytes: int) -> bytes:
    received = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        has_more: bool = message.get("more_body", False)
        if len(received) + len(chunk) > limit_bytes:
            raise TooLarge(f"the body has more than {limit_bytes} bytes, the limit; send less at once")
        if not has_more and not received:
            return chunk
        received += chunk
        if not has_more:
            return bytes(received)


def _inflate(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        plain = stream.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is no valid {encoding}: {error}") from error
    if len(plain) > limit_bytes:
        raise TooLarge(f"the body has more than {limit_bytes} bytes once decompressed, the limit; send less at once")
    if not stream.eof:
        raise InvalidRequest(f"the {encoding} body ends too early")
    if stream.unused_data:
        raise InvalidRequest(f"{len(stream.unused_data)} bytes follow the end of the {encoding} body; send one stream")
    return plain
