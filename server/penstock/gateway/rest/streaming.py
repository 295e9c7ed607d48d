"""Responses that are sent piece by piece: …/generate and …/generate_stream, and what a worker forwards to the core.

A client that disconnects ends the engine's work.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from penstock.gateway.metrics import Metrics, note_refused
from penstock.gateway.model_uploads import ModelUploads
from penstock.gateway.rest import openapi, schemas
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.openapi import ERRORS, RECEIVE_ERRORS, operation
from penstock.gateway.rest.request import (
    TIMEOUT_HEADER,
    RelayedResponse,
    call_of,
    deadline_of,
    model_of,
    read_body,
    run_scan,
    run_until_disconnect,
    single_header,
    with_client_errors,
)
from penstock.gateway.rest.responses import CLIENT_GONE, ClientDisconnected
from penstock.gateway.rest.routes import INFERENCE, MODEL, VERSION, HotRoute, caller_of
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.logs import get_logger
from penstock.protocol.call import HOP_BY_HOP, HttpAnswer, HttpCall, HttpStream, InferHead, end_to_end
from penstock.protocol.errors import InferenceError, InvalidRequest
from penstock.protocol.http_codec import read_generate_head
from penstock.protocol.identity import Identity, Role, Verb

JSON = b"application/json"
log = get_logger("rest")

router = APIRouter(route_class=HotRoute, tags=[INFERENCE], responses=ERRORS | RECEIVE_ERRORS)
_REQUEST: dict[str, Any] = {
    "role": Role.INFER,
    "headers": (TIMEOUT_HEADER,),
    "body": openapi.body({openapi.JSON: {"schema": {"type": "object"}}}),
}


@operation(
    router, "POST", f"{MODEL}/generate", f"{VERSION}/generate", response_model=schemas.GenerateResponse, **_REQUEST
)
async def generate(request: Request) -> Response:
    """Infer by the inputs' names.

    The inputs as members, each by its name; the rest and `parameters` go to the model as parameters. One answer: a
    model that gives several needs generate_stream.
    """
    head, call = await _read(request)
    work = request.app.state.plane.relay(
        Verb.INFER, head, call, caller=caller_of(request), deadline=deadline_of(request)
    )
    return RelayedResponse(with_client_errors(await run_until_disconnect(request.scope, request.receive, work)))


@operation(
    router,
    "POST",
    f"{MODEL}/generate_stream",
    f"{VERSION}/generate_stream",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
    **_REQUEST,
)
async def generate_stream(request: Request) -> Response:
    """The same, answer by answer.

    As generate; each answer is an event of the stream, as it comes. An error after the first is an event, too.
    """
    head, call = await _read(request)
    opened = partial(
        request.app.state.plane.stream, head, call, caller=caller_of(request), deadline=deadline_of(request)
    )
    return _StreamedResponse(request.app.state.record, opened, has_events=True)


async def _read(request: Request) -> tuple[InferHead, HttpCall]:
    limits: RestOptions = request.app.state.limits
    body = await read_body(request, limits)
    if single_header(request, "content-encoding") not in ("", "identity"):
        raise InvalidRequest("Unsupported content-encoding, only 'identity' is supported.")  # Triton's words
    head = await run_scan(len(body), read_generate_head, body, model_of(request), limits.max_json_depth)
    return head, call_of(request, body)


Open = Callable[[], AbstractAsyncContextManager[HttpStream]]


class _StreamedResponse(Response):
    """A response that is sent piece by piece, each before the next is read. A disconnect cancels the work."""

    def __init__(self, record: Metrics, open_stream: Open, *, has_events: bool) -> None:
        """has_events: the answer is a model's; once it has begun, an error is one more event, in Triton's form.

        Any other answer is cut with its connection.
        """
        self._record = record
        self._open = open_stream
        self._has_events = has_events
        self._has_begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(scope, receive, self._relay(scope, receive, send))
        except ClientDisconnected:
            if not self._has_begun:
                raise
            await Response(status_code=CLIENT_GONE)(scope, receive, send)  # not sent any more; it is counted
        except InferenceError as error:
            if not self._has_begun:
                raise
            note_refused(self._record, log, error, "answer broken off")
            await self._break_off(send, error.message)
        except asyncio.CancelledError:  # the grace of a drain is over
            if self._has_begun:
                await self._break_off(send, "this gateway stopped before the answer ended; send to another one")
            raise

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._open() as stream:
            if self._has_events and _is_plain_error(stream):
                answer = HttpAnswer(stream.status, stream.headers, b"".join([piece async for piece in stream.chunks]))
                await RelayedResponse(with_client_errors(answer))(scope, receive, send)
                return
            self._has_begun = True
            dropped = HOP_BY_HOP | {b"content-length"} if self._has_events else HOP_BY_HOP
            headers = list(end_to_end(stream.headers, dropped))
            await send({"type": "http.response.start", "status": stream.status, "headers": headers})
            async for piece in stream.chunks:
                await _send_piece(send, piece)
        await _send_end(send)

    async def _break_off(self, send: Send, text: str) -> None:
        if self._has_events:
            await _send_piece(send, b"data: %s\n\n" % msgspec.json.encode({"error": text}))
            await _send_end(send)


def _is_plain_error(stream: HttpStream) -> bool:
    """Whether the engine refused the request, at its usual length, before any event."""
    return stream.status >= 400 and (b"content-type", JSON) in stream.headers


async def _send_piece(send: Send, piece: bytes) -> None:
    """Returns when the connection can send more."""
    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _send_end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


FORWARD_MARGIN_S = 0.25  # beyond a deadline, which the core keeps itself, before a core that says nothing is given up


@dataclass(frozen=True, slots=True)
class CoreRoute:
    """A worker's route to the core. has_engine: the engine is in the core's process, so images are decoded there.

    uploads: where the worker receives models that the core adds.
    """

    core: CoreRelay
    has_engine: bool
    uploads: ModelUploads


class HttpForwarder:
    """The endpoint for requests that a worker does not serve itself. The body of a GET is not read, as in the core."""

    def __init__(self, core: CoreRelay, limits: RestOptions, record: Metrics) -> None:
        self._core = core
        self._limits = limits
        self._record = record

    async def __call__(self, request: Request) -> Response:
        body = b"" if request.method == "GET" else await read_body(request, self._limits)
        call, deadline = call_of(request, body), _forward_deadline(request)
        opened = partial(_forwarded_stream, self._core, call, caller_of(request), deadline)
        return _StreamedResponse(self._record, opened, has_events=False)


def forwarded(routes: Iterable[BaseRoute], forwarder: HttpForwarder) -> APIRouter:
    """These routes, with the same checks before the body, answered by the core."""
    router = APIRouter(route_class=HotRoute, include_in_schema=False)
    for route in routes:
        if isinstance(route, APIRoute):
            router.add_api_route(
                route.path,
                forwarder.__call__,
                methods=route.methods,
                tags=route.tags,
                dependencies=route.dependencies,
                name=route.name,
            )
    return router


def _forward_deadline(request: Request) -> float | None:
    """A moment after the client's deadline; None if it set no valid one."""
    try:
        deadline = deadline_of(request)
    except InferenceError:
        return None
    return None if deadline is None else deadline + FORWARD_MARGIN_S


@asynccontextmanager
async def _forwarded_stream(
    core: CoreRelay, call: HttpCall, caller: Identity, deadline: float | None
) -> AsyncIterator[HttpStream]:
    stream = await core.stream(call, caller, deadline=deadline)
    async with aclosing(stream.chunks):
        yield stream
