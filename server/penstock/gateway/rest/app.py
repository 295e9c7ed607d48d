"""The HTTP application: route table, error handlers, tracing, request counting, and a direct path for inference."""

import asyncio
import logging
import time
import traceback
from dataclasses import replace
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.dataplane import DataPlane
from penstock.gateway.rest.connection import ANSWER_IS_COUNTED
from penstock.gateway.rest.image import ImageEndpoint
from penstock.gateway.rest.infer import InferEndpoint
from penstock.gateway.rest.limits import RestLimits
from penstock.gateway.rest.models import ExplainEndpoint, HealthEndpoints, ModelEndpoints, SettingsEndpoints
from penstock.gateway.rest.openapi import OpenApiEndpoint
from penstock.gateway.rest.responses import (
    CLIENT_GONE,
    ClientDisconnected,
    RequestRecorder,
    error_response,
    response_of,
)
from penstock.gateway.rest.routes import ForwardedIdentity, RawPathRoute, RequestAuthentication, RouteSpec, with_cors
from penstock.gateway.rest.shared_memory import shared_memory_rows
from penstock.gateway.rest.streaming import CoreRoute, GenerateEndpoints, HttpForwarder
from penstock.gateway.tracing import PARENT_HEADERS, Tracer, current_trace
from penstock.logs import get_logger
from penstock.protocol.errors import InferenceError
from penstock.protocol.identity import ALL_ROLES, Role

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
    """The method and the row of the table, not the path: names are few."""
    route = scope.get("route")
    return f"{scope['method']} {route.row.path}" if isinstance(route, RawPathRoute) else f"{scope['method']} (no route)"


LINGER_S = 1.0
WATCHED_FROM_BYTES = 1 << 20

log = get_logger("rest")


class RootMiddleware:
    """Turns an unexpected error into one log line and a 500, and records inference requests.

    is_counting: whether it does the latter; not of a core, whose fronts do.
    """

    def __init__(self, app: ASGIApp, plane: DataPlane, record: RequestRecorder, *, is_counting: bool = True) -> None:
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
            self._record.rejected("internal")
            if not exchange.status:
                await error_response("internal error", 500)(scope, exchange.receive, exchange.send)
        finally:
            exchange.give_back()
        if self._is_counting:
            self._count(scope, exchange)

    def _count(self, scope: Scope, exchange: "Exchange") -> None:
        if exchange.status == CLIENT_GONE:
            self._record.cancelled(_PROTOCOL)
            return
        route = scope.get("route")
        if isinstance(route, RawPathRoute) and route.row.is_inference:
            model = self._plane.model_label(scope["path_params"]["model"])
            self._record.request_done(
                model=model, protocol=_PROTOCOL, code=str(exchange.status), seconds=exchange.seconds
            )


class Exchange:
    """One request and its answer.

    An answer that comes before the body was read closes the connection, but lingers for a moment and throws the
    rest of the body away: closing at once would reset it, and the client might never see the answer.
    While more of a body is to come, what came of it counts against admission. Answers of a gateway that is about to
    stop close their connections, so that no client sends the next request on one that is just being closed.
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

    async def receive(self) -> Message:
        """The next message. Raises Overloaded where too many bytes of bodies are on their way already."""
        message = await self._receive()
        if message.get("more_body", False):
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

    def _hold(self, size_bytes: int) -> None:
        self._plane.admission.receive(size_bytes, before=self._receiving_bytes)
        self._receiving_bytes += size_bytes

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


__all__ = ["RequestRecorder", "RestLimits", "create_app"]


_MODEL = "/v2/models/{model}[/versions/{version}]"
_REPOSITORY = "/v2/repository[/{repository}]"
_GET, _POST, _ANY = ("GET",), ("POST",), ("GET", "POST")


def create_app(
    plane: DataPlane,
    limits: RestLimits,
    record: RequestRecorder,
    *,
    gate: RequestAuthentication | ForwardedIdentity | None = None,
    way: CoreRoute | None = None,
) -> ASGIApp:
    """KServe v2 and the image endpoint over the plane. Errors are always {"error": "…"}.

    gate: checks each request before its body is read; a core's is a FrontGate. way: of a front, which serves only
    inference and health itself, and passes everything else on.
    """
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each malformed body
    rows = _route_table(plane, limits, record)
    passed_on = HttpForwarder(way.core, limits, record) if way is not None else None
    if way is not None and passed_on is not None:
        rows = [row if _is_served(row, way) else replace(row, endpoint=passed_on) for row in rows]
    described = passed_on or OpenApiEndpoint(plane, rows, gate.open_to if gate is not None else ALL_ROLES)
    rows.append(RouteSpec(_GET, "/openapi.json", described, "What is served here."))
    # Off, or it looks at the environment nine times a request.
    off: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=off)
    has_workers = isinstance(gate, ForwardedIdentity)
    routes = [RawPathRoute(row, gate) for row in rows]
    app.router.routes[:0] = routes
    app.add_middleware(RootMiddleware, plane=plane, record=record, is_counting=not has_workers)
    if plane.tracer is not None:
        app.add_middleware(TraceMiddleware, tracer=plane.tracer)
    refusals = _ErrorHandlers(record)
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(ClientDisconnected, _client_gone)
    app.add_exception_handler(InferenceError, refusals.answer)
    lane: ASGIApp = RootMiddleware(_HotPath(refusals), plane, record, is_counting=not has_workers)
    if plane.tracer is not None:
        lane = TraceMiddleware(lane, tracer=plane.tracer)
    fork = _HotPathDispatcher(
        app, lane, [route for route in routes if isinstance(route.row.endpoint, InferEndpoint | ImageEndpoint)]
    )
    return with_cors(fork, gate.cors_origins if gate is not None else ())


def _route_table(plane: DataPlane, limits: RestLimits, record: RequestRecorder) -> list[RouteSpec]:
    health, models = HealthEndpoints(plane), ModelEndpoints(plane, limits)
    infer, image = InferEndpoint(plane, limits), ImageEndpoint(plane, limits)
    generate, settings = GenerateEndpoints(plane, limits, record), SettingsEndpoints(plane, limits)
    return [
        RouteSpec(_POST, f"{_MODEL}/infer", infer, "Infer from tensors.", is_inference=True),
        RouteSpec(
            _POST, f"{_MODEL}/image", image, "Infer from encoded images.", is_inference=True, takes_any_type=True
        ),
        RouteSpec(_GET, "/v2/health/live", health.live, "Whether the process lives.", is_open=True),
        RouteSpec(_GET, "/v2/health/ready", health.ready, "Whether to send requests here.", is_open=True),
        RouteSpec(_GET, "/v2", models.server_metadata, "Name, version and extensions."),
        RouteSpec(_GET, "/v2/models/stats", models.read, "Statistics of all models."),
        RouteSpec(_GET, _MODEL, models.read, "A model's metadata."),
        RouteSpec(_GET, f"{_MODEL}/ready", models.ready, "Whether a model is ready.", or_role=Role.INFER),
        RouteSpec(_GET, f"{_MODEL}/config", models.config, "A model's configuration."),
        RouteSpec(_GET, f"{_MODEL}/stats", models.read, "A model's statistics."),
        RouteSpec(_GET, "/v2/models/{model}/explain", ExplainEndpoint(plane), "How its batches are formed."),
        RouteSpec(_POST, f"{_REPOSITORY}/index", models.index, "The models of the repository.", role=Role.READ),
        RouteSpec(_POST, f"{_REPOSITORY}/models/{{model}}/load", models.load, "Load or reload a model."),
        RouteSpec(_POST, f"{_REPOSITORY}/models/{{model}}/unload", models.unload, "Unload a model."),
        RouteSpec(_POST, f"{_MODEL}/generate", generate.generate, "Infer by the inputs' names.", is_inference=True),
        RouteSpec(
            _POST, f"{_MODEL}/generate_stream", generate.stream, "The same, answer by answer.", is_inference=True
        ),
        *shared_memory_rows(plane, limits),
        RouteSpec(_ANY, "/v2/models/{model}/trace/setting", settings, "A model's trace settings."),
        RouteSpec(_ANY, "/v2/trace/setting", settings, "The trace settings."),
        RouteSpec(_ANY, "/v2/logging", settings, "The log settings."),
    ]


def _is_served(row: RouteSpec, way: CoreRoute) -> bool:
    """Whether a front serves the row itself."""
    kinds = (InferEndpoint,) if way.has_engine else (InferEndpoint, ImageEndpoint)
    return row.is_open or isinstance(row.endpoint, kinds)


class _HotPathDispatcher:
    """Inference goes by a lane of its own, past the layers that the framework lays around every call."""

    def __init__(self, app: FastAPI, lane: ASGIApp, routes: list[RawPathRoute]) -> None:
        """routes: of those that the lane takes."""
        self.app = app
        self._lane = lane
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for route in self._routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                scope.update(found)
                await self._lane(scope, receive, send)
                return
        await self.app(scope, receive, send)


class _HotPath:
    """The route that was found, and what the app's handlers would make of its errors."""

    def __init__(self, refusals: "_ErrorHandlers") -> None:
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await scope["route"].handle(scope, receive, send)
            return
        except InferenceError as error:
            answer = await self._refusals.answer(Request(scope), error)
        except ClientDisconnected as error:
            answer = await _client_gone(Request(scope), error)
        await answer(scope, receive, send)


class _ErrorHandlers:
    """The response to a request that the gateway refused or failed; counted, and logged at debug level."""

    def __init__(self, record: RequestRecorder) -> None:
        self._record = record

    async def answer(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, InferenceError):
            raise error
        self._record.rejected(error.reason)
        log.debug("request refused", reason=error.reason, error=error.message, path=request.scope["path"])
        return response_of(error)


async def _routing_error(_: Request, error: Exception) -> Response:
    """404 and 405, in Triton's words."""
    if not isinstance(error, HTTPException):
        raise error
    return error_response(HTTPStatus(error.status_code).phrase, error.status_code, error.headers)


async def _client_gone(_: Request, __: Exception) -> Response:
    """Not sent any more; its status says why."""
    return Response(status_code=CLIENT_GONE)
