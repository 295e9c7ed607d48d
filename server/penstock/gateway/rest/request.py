"""Reads an HTTP request: body within its limits, headers, model, deadline; cancels its work when the client
disconnects.

Builds the HttpCall that is relayed and the response from the engine's answer.
"""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.responses import ClientDisconnected
from penstock.gateway.rest.served_request import SERVED_REQUEST, ServedRequest
from penstock.protocol.call import CONNECTION_HEADERS, HOP_BY_HOP, HttpAnswer, HttpCall, InferHead, end_to_end
from penstock.protocol.errors import BodyTooSlow, DeadlineExceeded, InvalidRequest, TooLarge
from penstock.protocol.http_body import NOT_ENCODED, BodyBuffer, inflate

BODY_IS_STORED = "penstock.body_is_stored"  # in a scope: the body is written to disk, and does not count as memory
_WRITTEN_AT_ONCE_BYTES = 1 << 20
_INFLATE_THREAD_FROM_BYTES = 4 << 10  # a thousand times as much may be in it


async def read_body(request: Request, limits: RestOptions) -> bytes:
    """The whole body as it was sent.

    Raises TooLarge at the limit (by Content-Length before a byte is read), BodyTooSlow at the receive deadline,
    ClientDisconnected.
    """
    _check_content_length(request, limits.max_body_bytes)
    served: ServedRequest | None = request.scope.get(SERVED_REQUEST)
    if served is not None and served.has_whole_body:
        return await _receive(request, limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _receive(request, limits.max_body_bytes)
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not arrive within {limits.body_timeout_s:g} s; send it faster") from error


async def store_body(request: Request, path: Path, limits: RestOptions) -> int:
    """Streams the body to a new file. Returns its size in bytes.

    The time limit grows with the size: see RestOptions. Raises TooLarge, BodyTooSlow, ClientDisconnected, OSError.
    """
    request.scope[BODY_IS_STORED] = True
    started, size_bytes, more = asyncio.get_running_loop().time(), 0, True
    pieces = BodyBuffer()
    with path.open("xb", buffering=0) as file:
        while more:
            until = started + limits.body_timeout_s + size_bytes / limits.min_upload_bytes_per_s
            try:
                async with asyncio.timeout_at(until):
                    message = await request.receive()
            except TimeoutError as error:
                raise BodyTooSlow(
                    f"{size_bytes} bytes of the body arrived within {until - started:.1f} s; send at least "
                    f"{limits.min_upload_bytes_per_s} bytes a second"
                ) from error
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            piece: bytes = message.get("body", b"")
            size_bytes, more = size_bytes + len(piece), message.get("more_body", False)
            check_model_size(size_bytes, limits)
            pieces.add(piece)
            if pieces.size_bytes >= _WRITTEN_AT_ONCE_BYTES or not more:
                await _written(file, pieces.take())
    return size_bytes


def declared_bytes(request: Request) -> int:
    """Content-Length in bytes; 0 for a chunked body."""
    declared = first_header(request.scope, b"content-length")
    return int(declared) if declared.isdigit() else 0


def check_model_size(size_bytes: int, limits: RestOptions) -> None:
    """Raises TooLarge if the model is larger than max_model_bytes."""
    if size_bytes > limits.max_model_bytes:
        raise TooLarge(
            f"the model has {size_bytes} bytes or more (limit {limits.max_model_bytes}); send a smaller one, or raise "
            "max_model_bytes of the gateway"
        )


async def _written(file: FileIO, content: bytes) -> None:
    """Writes in a thread. Waits for the thread also if cancelled, as the caller then closes the file."""
    writing = asyncio.ensure_future(asyncio.to_thread(_write, file, content))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing})
        raise


def _write(file: FileIO, content: bytes) -> None:
    """Writes all bytes: a raw file can write fewer per call."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


async def decompressed(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The decompressed body, in a thread if it is long. Raises as `inflate`."""
    if encoding in NOT_ENCODED or len(body) < _INFLATE_THREAD_FROM_BYTES:
        return inflate(body, encoding, limit_bytes)
    return await asyncio.to_thread(inflate, body, encoding, limit_bytes)


def single_header(request: Request, name: str) -> str:
    """The header's value, empty if it is absent. See header_if_given."""
    return header_if_given(request, name) or ""


def header_if_given(request: Request, name: str) -> str | None:
    """The header's value, None if it is absent. name: in lower case. Raises InvalidRequest if it is repeated."""
    wanted = name.encode()
    values = [pair[1] for pair in request.scope["headers"] if pair[0] == wanted]
    if len(values) > 1:
        raise InvalidRequest(f"the header {name} is given {len(values)} times; give it once")
    return values[0].decode("latin-1").strip() if values else None


def first_header(scope: Scope, name: bytes) -> bytes:
    """The header's value: the first if it is repeated, empty if it is absent. name: in lower case."""
    for known, value in scope["headers"]:
        if known == name:
            return bytes(value)
    return b""


def _check_content_length(request: Request, limit_bytes: int) -> None:
    if (size_bytes := declared_bytes(request)) > limit_bytes:
        raise TooLarge(f"the body has {size_bytes} bytes (limit {limit_bytes}); send less at once")


async def _receive(request: Request, limit_bytes: int) -> bytes:
    received = BodyBuffer()
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


TIMEOUT_HEADER = "x-request-timeout-ms"
MAX_TIMEOUT_S = 3600.0
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?", re.ASCII)


def deadline_of(request: Request, timeout_us: int | None = None) -> float | None:
    """Monotonic seconds, counted from now (the body's last byte); None if the client set none.

    timeout_us: the v2 parameter `timeout`, 0 for none. The earlier of header and parameter holds, an hour at most.
    Raises InvalidRequest for a header that is no number, DeadlineExceeded for one that is not positive.
    """
    timeouts_s = [] if not timeout_us else [timeout_us / 1e6]
    given = header_if_given(request, TIMEOUT_HEADER)
    if given is not None:
        timeouts_s.append(_header_s(given))
    return time.monotonic() + min(*timeouts_s, MAX_TIMEOUT_S) if timeouts_s else None


def _header_s(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"{TIMEOUT_HEADER} is {text[:80]!r}; it must be a number of milliseconds")
    timeout_s = float(text) / 1000
    if timeout_s <= 0:
        raise DeadlineExceeded(f"{TIMEOUT_HEADER} is {text[:80]}: no time is left; allow more")
    return timeout_s


T = TypeVar("T")


async def run_until_disconnect(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns or raises; cancelled, and ClientDisconnected raised, once the client has left.

    Call it when the body has been read: what receive still gives is thrown away.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("run_until_disconnect needs a running task")
    has_left = False

    def leave() -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    served: ServedRequest | None = scope.get(SERVED_REQUEST)
    if served is None or not served.has_whole_body:
        unwatch: Callable[[], object] = asyncio.create_task(_watch(receive, leave)).cancel
    elif served.is_disconnected:
        work.close()
        raise ClientDisconnected
    else:
        served.watch(leave)
        unwatch = served.unwatch
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        unwatch()


async def _watch(receive: Receive, leave: Callable[[], None]) -> None:
    """For other ASGI servers, and for requests whose body has not arrived in full."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


P = ParamSpec("P")
_SCAN_THREAD_FROM_BYTES = 1 << 20


async def run_scan(size_bytes: int, scan: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """scan(…), in a thread for texts long enough to block the event loop."""
    if size_bytes < _SCAN_THREAD_FROM_BYTES:
        return scan(*args, **kwargs)
    return await asyncio.to_thread(scan, *args, **kwargs)


# Triton answers 500 to JSON that it cannot read and to the load of a model that its repository has not, and 503 to a
# log format that it does not know, by these texts.
_UNREADABLE = re.compile(
    rb'\{"error":"(Unable to (parse|set)|failed to parse the request JSON|attempt to (access|get)|'
    rb"Expected JSON object for keyword|invalid argument for --log_format|failed to load '[^\"]*', failed to poll|"
    rb"unexpected error on creating Triton parameter|"
    rb"(Converting keyword: 'parameters': )?parameter key '.*' was not found in the JSON)"  # it holds U+0000
)
CACHED_NAMES = 256
_REPLACED_ANSWER_HEADERS = HOP_BY_HOP | {b"content-length"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class RelayedResponse(Response):
    """The engine's response, unchanged."""

    def __init__(self, answer: HttpAnswer) -> None:
        self.status_code = answer.status
        self.body = answer.body
        self.background = None
        self.raw_headers = list(end_to_end(answer.headers, _REPLACED_ANSWER_HEADERS))
        self.raw_headers.append((b"content-length", b"%d" % len(answer.body)))


def model_of(request: Request) -> InferHead:
    """Name and version as the path has them, not decoded. Raises InvalidRequest for a name that nothing can have."""
    name = str(request.path_params.get("model", ""))
    _check_name(name)
    return InferHead(name, str(request.path_params.get("version", "")))


@lru_cache(CACHED_NAMES)
def _check_name(name: str) -> None:
    try:
        decoded = unquote_to_bytes(name).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("the model name in the path is not UTF-8") from error
    if _CONTROL.search(decoded):
        raise InvalidRequest("the model name in the path has control characters")
    if decoded in (".", ".."):
        raise InvalidRequest(f"the model name in the path is {decoded!r}, which names a folder")


def with_client_errors(answer: HttpAnswer) -> HttpAnswer:
    """400 instead of a 5xx for a request that the engine could not read; nothing else changes."""
    if answer.status >= 500 and _UNREADABLE.match(answer.body):
        return HttpAnswer(400, answer.headers, answer.body)
    return answer


def call_of(request: Request, body: bytes) -> HttpCall:
    """The request as received, without hop-by-hop headers."""
    scope = request.scope
    query: bytes = scope["query_string"]
    target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
    return HttpCall(scope["method"], target, end_to_end(tuple(scope["headers"]), CONNECTION_HEADERS), body)
