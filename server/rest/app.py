"""The composer of the REST front: the table of routes, the error handlers, the app."""

import logging
from dataclasses import replace
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from server.core.caller import EVERY_ROLE, Role
from server.core.errors import InferenceError
from server.dataplane import DataPlane
from server.logs import get_logger
from server.rest.cors import with_cors
from server.rest.description import Description
from server.rest.errors import CLIENT_GONE, ClientDisconnected, error_response, response_of
from server.rest.explain import ExplainEndpoint
from server.rest.gate import FrontGate, Gate
from server.rest.generate import GenerateEndpoints
from server.rest.health import HealthEndpoints
from server.rest.image import ImageEndpoint
from server.rest.infer import InferEndpoint
from server.rest.limits import RestLimits
from server.rest.models import ModelEndpoints
from server.rest.passed_on import PassedOn, WayToCore
from server.rest.recorder import RequestRecorder
from server.rest.root import Root
from server.rest.routes import Row, WireRoute
from server.rest.settings_calls import SettingsEndpoints
from server.rest.shared_memory import shared_memory_rows
from server.rest.trace import Traced

__all__ = ["RequestRecorder", "RestLimits", "create_app"]

log = get_logger("rest")

_MODEL = "/v2/models/{model}[/versions/{version}]"
_REPOSITORY = "/v2/repository[/{repository}]"
_GET, _POST, _ANY = ("GET",), ("POST",), ("GET", "POST")


def create_app(
    plane: DataPlane,
    limits: RestLimits,
    record: RequestRecorder,
    *,
    gate: Gate | FrontGate | None = None,
    way: WayToCore | None = None,
) -> ASGIApp:
    """KServe v2 and the image endpoint over the plane. Errors are always {"error": "…"}.

    gate: checks each request before its body is read; a core's is a FrontGate. way: of a front, which serves only
    inference and health itself, and passes everything else on.
    """
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each malformed body
    rows = _rows(plane, limits, record)
    passed_on = PassedOn(way.core, limits, record) if way is not None else None
    if way is not None and passed_on is not None:
        rows = [row if _is_served(row, way) else replace(row, endpoint=passed_on) for row in rows]
    described = passed_on or Description(plane, rows, gate.open_to if gate is not None else EVERY_ROLE)
    rows.append(Row(_GET, "/openapi.json", described, "What is served here."))
    # Off, or it looks at the environment nine times a request.
    off: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=off)
    has_fronts = isinstance(gate, FrontGate)
    routes = [WireRoute(row, gate) for row in rows]
    app.router.routes[:0] = routes
    app.add_middleware(Root, plane=plane, record=record, is_counting=not has_fronts)
    if plane.tracer is not None:
        app.add_middleware(Traced, tracer=plane.tracer)
    refusals = _Refusals(record)
    app.add_exception_handler(HTTPException, _plain_refusal)
    app.add_exception_handler(ClientDisconnected, _nobody_there)
    app.add_exception_handler(InferenceError, refusals.answer)
    lane: ASGIApp = Root(_Lane(refusals), plane, record, is_counting=not has_fronts)
    if plane.tracer is not None:
        lane = Traced(lane, tracer=plane.tracer)
    fork = _Fork(
        app, lane, [route for route in routes if isinstance(route.row.endpoint, InferEndpoint | ImageEndpoint)]
    )
    return with_cors(fork, gate.cors_origins if gate is not None else ())


def _rows(plane: DataPlane, limits: RestLimits, record: RequestRecorder) -> list[Row]:
    health, models = HealthEndpoints(plane), ModelEndpoints(plane, limits)
    infer, image = InferEndpoint(plane, limits), ImageEndpoint(plane, limits)
    generate, settings = GenerateEndpoints(plane, limits, record), SettingsEndpoints(plane, limits)
    return [
        Row(_POST, f"{_MODEL}/infer", infer, "Infer from tensors.", is_inference=True),
        Row(_POST, f"{_MODEL}/image", image, "Infer from encoded images.", is_inference=True, takes_any_type=True),
        Row(_GET, "/v2/health/live", health.live, "Whether the process lives.", is_open=True),
        Row(_GET, "/v2/health/ready", health.ready, "Whether to send requests here.", is_open=True),
        Row(_GET, "/v2", models.server_metadata, "Name, version and extensions."),
        Row(_GET, "/v2/models/stats", models.read, "Statistics of all models."),
        Row(_GET, _MODEL, models.read, "A model's metadata."),
        Row(_GET, f"{_MODEL}/ready", models.ready, "Whether a model is ready.", or_role=Role.INFER),
        Row(_GET, f"{_MODEL}/config", models.config, "A model's configuration."),
        Row(_GET, f"{_MODEL}/stats", models.read, "A model's statistics."),
        Row(_GET, "/v2/models/{model}/explain", ExplainEndpoint(plane), "How its batches are formed."),
        Row(_POST, f"{_REPOSITORY}/index", models.index, "The models of the repository.", role=Role.READ),
        Row(_POST, f"{_REPOSITORY}/models/{{model}}/load", models.load, "Load or reload a model."),
        Row(_POST, f"{_REPOSITORY}/models/{{model}}/unload", models.unload, "Unload a model."),
        Row(_POST, f"{_MODEL}/generate", generate.generate, "Infer by the inputs' names.", is_inference=True),
        Row(_POST, f"{_MODEL}/generate_stream", generate.stream, "The same, answer by answer.", is_inference=True),
        *shared_memory_rows(plane, limits),
        Row(_ANY, "/v2/models/{model}/trace/setting", settings, "A model's trace settings."),
        Row(_ANY, "/v2/trace/setting", settings, "The trace settings."),
        Row(_ANY, "/v2/logging", settings, "The log settings."),
    ]


def _is_served(row: Row, way: WayToCore) -> bool:
    """Whether a front serves the row itself."""
    kinds = (InferEndpoint,) if way.has_engine else (InferEndpoint, ImageEndpoint)
    return row.is_open or isinstance(row.endpoint, kinds)


class _Fork:
    """Inference goes by a lane of its own, past the layers that the framework lays around every call."""

    def __init__(self, app: FastAPI, lane: ASGIApp, routes: list[WireRoute]) -> None:
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


class _Lane:
    """The route that was found, and what the app's handlers would make of its errors."""

    def __init__(self, refusals: "_Refusals") -> None:
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await scope["route"].handle(scope, receive, send)
            return
        except InferenceError as error:
            answer = await self._refusals.answer(Request(scope), error)
        except ClientDisconnected as error:
            answer = await _nobody_there(Request(scope), error)
        await answer(scope, receive, send)


class _Refusals:
    """What the gateway refused or failed itself: counted, told, and logged for who debugs."""

    def __init__(self, record: RequestRecorder) -> None:
        self._record = record

    async def answer(self, request: Request, error: Exception) -> Response:
        if not isinstance(error, InferenceError):
            raise error
        self._record.rejected(error.reason)
        log.debug("request refused", reason=error.reason, error=error.message, path=request.scope["path"])
        return response_of(error)


async def _plain_refusal(_: Request, error: Exception) -> Response:
    """404 and 405, in Triton's words."""
    if not isinstance(error, HTTPException):
        raise error
    return error_response(HTTPStatus(error.status_code).phrase, error.status_code, error.headers)


async def _nobody_there(_: Request, __: Exception) -> Response:
    """Not sent any more; its status says why."""
    return Response(status_code=CLIENT_GONE)
