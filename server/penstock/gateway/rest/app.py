"""The HTTP application: route table, error handlers, tracing, request counting, and a direct path for inference."""

import asyncio
import logging
import time
import traceback
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain

from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.load.service import LoadTests
from penstock.gateway.metrics import Metrics, note_refused
from penstock.gateway.model_adder import ModelAdder
from penstock.gateway.model_check import ModelChecker
from penstock.gateway.rest import identity, load, model_reports, models, openapi, shared_memory, streaming, system
from penstock.gateway.rest.add_model import add_router
from penstock.gateway.rest.image import image_router
from penstock.gateway.rest.infer import infer_router
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.model_files import ModelFiles
from penstock.gateway.rest.request import BODY_IS_STORED
from penstock.gateway.rest.responses import CLIENT_GONE, ClientDisconnected, error_response, response_of
from penstock.gateway.rest.routes import (
    CALLER,
    INFERENCE,
    QUOTAS,
    ForwardedIdentity,
    HotRoute,
    RequestAuthentication,
    with_cors,
)
from penstock.gateway.rest.served_request import ANSWER_IS_COUNTED
from penstock.gateway.rest.streaming import CoreRoute, HttpForwarder, forwarded
from penstock.gateway.system.model_reports import ModelReports
from penstock.gateway.system.reports import SystemReports
from penstock.gateway.tracing import PARENT_HEADERS, Tracer, current_trace
from penstock.logs import get_logger
from penstock.protocol.errors import InferenceError, error_for_client
from penstock.protocol.identity import ANONYMOUS, Identity

_PROTOCOL = "http"
_HEALTH = "/v2/health/"
_PARENTS = {name.encode(): name for name in PARENT_HEADERS}


class TraceMiddleware:
    """Begins the trace that the caller's traceparent names. Health checks have none."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_HEALTH):
            await self._app(scope, receive, send)
            return
        parents = [(_PARENTS[name], value.decode("latin-1")) for name, value in scope["headers"] if name in _PARENTS]
        trace = self._tracer.begin(parents, _PROTOCOL)
        current_trace.set(trace)  # of this request's own task
        status = 0

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            trace.end(_span_name(scope), code=status, is_error=status == 0 or status >= 500)


def _span_name(scope: Scope) -> str:
    """The method and the route's template, not the path: names are few."""
    route = scope.get("route")
    return f"{scope['method']} {route.path_format}" if isinstance(route, APIRoute) else f"{scope['method']} (no route)"


LINGER_S = 1.0
WATCHED_FROM_BYTES = 1 << 20

log = get_logger("rest")


class RootMiddleware:
    """Turns an unexpected error into one log line and a 500, and records inference requests.

    is_counting: whether it does the latter. In a core it is False: the workers count.
    """

    def __init__(self, app: ASGIApp, plane: DataPlane, record: Metrics, *, is_counting: bool = True) -> None:
        self._is_counting = is_counting
        self._app = app
        self._plane = plane
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, plane=self._plane)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:  # noqa: BLE001 - the root of the request's task
            trace = "".join(traceback.format_exception(error))
            log.error("request failed", method=scope["method"], path=scope["path"], error=repr(error), traceback=trace)
            shown = error_for_client(error)
            self._record.rejected(shown.reason)
            if not exchange.status:
                await response_of(shown)(scope, exchange.receive, exchange.send)
        finally:
            exchange.give_back()
        if self._is_counting:
            self._count(scope, exchange)

    def _count(self, scope: Scope, exchange: "Exchange") -> None:
        if exchange.status == CLIENT_GONE:
            self._record.cancelled(_PROTOCOL)
            return
        route = scope.get("route")
        if isinstance(route, APIRoute) and INFERENCE in route.tags:
            model = self._plane.model_label(scope["path_params"]["model"])
            self._record.request_done(
                model=model, protocol=_PROTOCOL, code=str(exchange.status), seconds=exchange.seconds
            )


class Exchange:
    """One request and its answer.

    An answer that comes before the body was read closes the connection, but lingers for a moment and throws the
    rest of the body away: closing at once would reset it, and the client might never see the answer.
    While more of a body is to come, what came of it counts against admission and the client's share. Answers of a
    gateway that is about to stop close their connections, so that no client sends the next request on one that is just
    being closed.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, plane: DataPlane) -> None:
        self.status = 0
        self.seconds = 0.0
        self._scope = scope
        self._receive = receive
        self._send = send
        self._plane = plane
        self._started = time.monotonic()
        self._has_unread_body = _announces_body(scope)
        self._receiving_bytes = 0
        self._client_bytes = 0  # of these, counted against the client's share

    async def receive(self) -> Message:
        """The next message. Raises Overloaded or QuotaExceeded where too many bytes of bodies are being received."""
        message = await self._receive()
        if message.get("more_body", False):
            if BODY_IS_STORED in self._scope:
                self.give_back()
            self._hold(len(message["body"]))
        else:
            self._has_unread_body = False
            self.give_back()
        return message

    def give_back(self) -> None:
        """The body is complete, or no longer needed."""
        if self._receiving_bytes:
            self._plane.admission.received(self._receiving_bytes)
            self._receiving_bytes = 0
        if self._client_bytes:
            self._scope[QUOTAS].received(self._client, self._client_bytes)
            self._client_bytes = 0

    def _hold(self, size_bytes: int) -> None:
        self._plane.admission.receive(size_bytes, before=self._receiving_bytes)
        self._receiving_bytes += size_bytes
        quotas: RateLimiter | None = self._scope.get(QUOTAS)
        if quotas is not None:
            quotas.receive(self._client, size_bytes, before=self._client_bytes)
            self._client_bytes += size_bytes

    @property
    def _client(self) -> Identity:
        client: Identity = self._scope.get(CALLER, ANONYMOUS)
        return client

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.seconds = time.monotonic() - self._started
            if self._has_unread_body or self._plane.is_stopping:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif self._has_unread_body and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._throw_rest_away()
            message = {"type": "http.response.body"}
        elif len(message.get("body", b"")) >= WATCHED_FROM_BYTES and not message.get("more_body", False):
            await self._send_watched(message)
            return
        await self._send(message)

    async def _send_watched(self, message: Message) -> None:
        """The answer counts whole until its reader has taken it: so long the transport keeps all of it, sent or not."""
        size_bytes = len(message["body"])
        self._scope[ANSWER_IS_COUNTED] = True
        self._plane.admission.hold(size_bytes)
        try:
            await self._send({**message, "more_body": True})
            await self._send({"type": "http.response.body"})  # waits until there is room for more
        finally:
            self._plane.admission.release(size_bytes)

    async def _throw_rest_away(self) -> None:
        self.give_back()
        try:
            async with asyncio.timeout(LINGER_S):
                while self._has_unread_body:
                    self._has_unread_body = (await self._receive()).get("more_body", False)
        except TimeoutError:
            return


def _announces_body(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            return True
    return False


@dataclass(frozen=True, slots=True)
class CoreServices:
    """Services of the process with the engine; workers have none. adder: adds models. system, models: reports.

    load: load tests. checker: checks models.
    """

    adder: ModelAdder | None = None
    system: SystemReports | None = None
    models: ModelReports | None = None
    load: LoadTests | None = None
    checker: ModelChecker | None = None


def create_app(
    plane: DataPlane,
    limits: RestOptions,
    record: Metrics,
    *,
    gate: RequestAuthentication | ForwardedIdentity | None = None,
    core_route: CoreRoute | None = None,
    services: CoreServices = CoreServices(),
) -> ASGIApp:
    """KServe v2 and the image endpoint over the plane. Errors are always {"error": "…"}.

    gate: checks each request before its body is read; a core's is a ForwardedIdentity. core_route: of a worker, which
    serves only inference and health itself, and forwards everything else.
    """
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each malformed body
    errors = _ErrorHandlers(record)
    app = FastAPI(
        openapi_url=None,  # see openapi.description
        docs_url=None,  # see openapi.docs
        redoc_url=None,
        redirect_slashes=False,
        # Off, or it looks at the environment nine times a request.
        telemetry=TelemetryConfig(tracing=False, metrics=False, logs=False),
        exception_handlers={
            HTTPException: errors.routing,
            ClientDisconnected: errors.client_gone,
            InferenceError: errors.refused,
            Exception: errors.internal,
        },
    )
    app.state.plane, app.state.limits, app.state.record, app.state.gate = plane, limits, record, gate
    app.state.services, app.state.takes_workers = services, isinstance(gate, ForwardedIdentity)
    _add_routes(app, core_route, services.adder)
    served: ASGIApp = _RawPaths(app, errors)
    served = RootMiddleware(served, plane, record, is_counting=not isinstance(gate, ForwardedIdentity))
    if plane.tracer is not None:
        served = TraceMiddleware(served, tracer=plane.tracer)
    return with_cors(served, gate.cors_origins if gate is not None else ())


def _add_routes(app: FastAPI, core_route: CoreRoute | None, adder: ModelAdder | None) -> None:
    """Adds the routers' own routes: include_router would build each a second time, at the first request."""
    plane, limits, record = app.state.plane, app.state.limits, app.state.record
    infer, image = infer_router(plane, limits), image_router(plane, limits)
    core, uploads = (core_route.core, core_route.uploads) if core_route else (None, adder.uploads if adder else None)
    files = ModelFiles(limits, uploads, core, takes_workers=app.state.takes_workers)
    add = add_router(files, adder, plane.refused_addition)
    served = [infer, image, add, models.health, openapi.pages, identity.router]
    others = [models.models, models.repository, models.settings, shared_memory.router, streaming.router, openapi.router]
    others += [system.router, model_reports.router]
    if core_route is None:
        served += [*others, load.router, model_reports.checks]
    else:
        if core_route.has_engine:
            served.remove(image)
            others.append(image)
        routes = chain.from_iterable(router.routes for router in others)
        forwarder = HttpForwarder(core_route.core, limits, record)
        with_key = chain(load.router.routes, model_reports.checks.routes)
        served += [forwarded(routes, forwarder), forwarded(with_key, load.with_client_key(forwarder))]
    app.router.routes += chain.from_iterable(router.routes for router in served)


class _RawPaths:
    """The application, with paths as they were received; hot routes are called without FastAPI's layers around them.

    A path is neither decoded nor merged: "a%2Fb" is one segment, and reaches the engine as it is.
    """

    def __init__(self, app: FastAPI, errors: "_ErrorHandlers") -> None:
        self._app = app
        self._errors = errors
        self._hot = [route for route in app.routes if isinstance(route, HotRoute)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = path = scope["raw_path"].decode("latin-1")
            for route in self._hot:
                found = route.path_regex.match(path)
                if found and scope["method"] in (route.methods or ()):
                    scope.update(app=self._app, route=route, path_params=found.groupdict())
                    await self._call(route, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _call(self, route: HotRoute, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await route.app(scope, receive, send)
            return
        except InferenceError as error:
            answer = await self._errors.refused(Request(scope), error)
        except ClientDisconnected as error:
            answer = await self._errors.client_gone(Request(scope), error)
        await answer(scope, receive, send)


class _ErrorHandlers:
    """The response to a request that the gateway refused or failed; a refusal is counted, and logged at debug level."""

    def __init__(self, record: Metrics) -> None:
        self._record = record

    async def refused(self, request: Request, error: Exception) -> Response:
        """By the table of errors."""
        if not isinstance(error, InferenceError):
            raise error
        note_refused(self._record, log, error, path=request.scope["path"])
        return response_of(error)

    async def routing(self, request: Request, error: Exception) -> Response:
        """404 and 405, in Triton's words; 405 with all methods of the path."""
        if not isinstance(error, HTTPException):
            raise error
        headers = error.headers
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            at_path = (each for each in request.app.routes if each.matches(request.scope)[0] is not Match.NONE)
            headers = {"Allow": ", ".join(sorted({method for each in at_path for method in each.methods}))}
        return error_response(HTTPStatus(error.status_code).phrase, error.status_code, headers)

    async def client_gone(self, _: Request, __: Exception) -> Response:
        """Not sent any more; its status says why."""
        return Response(status_code=CLIENT_GONE)

    async def internal(self, _: Request, error: Exception) -> Response:
        """RootMiddleware logs and counts the error, which Starlette raises again."""
        return response_of(error_for_client(error))
