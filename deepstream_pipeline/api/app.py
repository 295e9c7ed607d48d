"""The composer of the control API: its routes, its errors, its door."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepstream_pipeline.api import deepstream, streams
from deepstream_pipeline.api.answers import Refusal, error_answer, status_of
from deepstream_pipeline.api.audit import Audited
from deepstream_pipeline.api.calls import Calls
from deepstream_pipeline.api.door import Door
from deepstream_pipeline.api.faults import named_faults
from deepstream_pipeline.api.health import health_router
from deepstream_pipeline.api.options import ApiOptions
from deepstream_pipeline.api.page import page_router
from deepstream_pipeline.api.previews import FIRST_PICTURE_S, Viewers, previews_router
from deepstream_pipeline.errors import PipelineError
from deepstream_pipeline.interfaces import PipelineControl, Previews

log = structlog.get_logger(component="video")

CALLS_AT_ONCE = 32
_STILLS_AT_ONCE = 16
_BROKEN = "the API failed; its log says why"


@dataclass(frozen=True, slots=True)
class ApiApp:
    """The ASGI app, and the calls that it makes: closed when the server stops, so that nobody waits on."""

    app: ASGIApp
    calls: Sequence[Calls]

    def close(self) -> None:
        """Answer whoever waits, and end the moving previews. From the loop."""
        for each in self.calls:
            each.close()


def create_app(
    control: PipelineControl, previews: Previews, metrics: Callable[[], bytes], options: ApiOptions, content_type: str
) -> ApiApp:
    """Every route over the pipeline. metrics: the text, of that content type."""
    calls = Calls(CALLS_AT_ONCE, options.call_timeout_s)
    watching = Calls(options.max_viewers + _STILLS_AT_ONCE, FIRST_PICTURE_S + 5.0)
    health, asking = health_router(control, metrics, content_type)
    # Off, or it looks at the environment nine times a request.
    off: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
    app = FastAPI(
        title="penstock video",
        version="1",
        summary="Add, remove and watch the streams of a running pipeline.",
        docs_url=None,  # its pages load their parts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        telemetry=off,
    )
    app.include_router(health, responses=streams.ERRORS)
    app.include_router(streams.streams_router(control, calls, options), responses=streams.ERRORS)
    app.include_router(
        previews_router(control, previews, watching, Viewers(options.max_viewers)), responses=streams.ERRORS
    )
    app.include_router(deepstream.deepstream_router(control, calls, options), responses=deepstream.ERRORS)
    app.include_router(page_router(control, calls))
    _add_errors(app)
    guarded: ASGIApp = _Guarded(_with_cors(Door(app, options), options))
    if options.audit is not None:
        guarded = Audited(guarded, options.audit)
    return ApiApp(guarded, (calls, watching, asking))


def _with_cors(app: ASGIApp, options: ApiOptions) -> ASGIApp:
    """The app with CORS for `cors_origins`, without cookies; unchanged if there are none."""
    origins = options.browser_policy.cors_origins
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "PUT", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
    )


def _add_errors(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return _answer(request, error.status, error.text)

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, PipelineError)
        status = status_of(error)
        if status >= 500:
            log.warning("api_call_failed", reason=error.reason, error=error.message)
        return _answer(request, status, error.message)

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _answer(request, 400, named_faults(error.errors()))

    async def not_served(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {404: "nothing is", 405: f"{request.method} is not served"}.get(error.status_code)
        text = f"{what} at {request.url.path[:200]!r}; /openapi.json says what is" if what else str(error.detail)
        answer = _answer(request, error.status_code, text)
        answer.headers.update(error.headers or {})  # Allow, of a 405
        return answer

    async def broken(request: Request, _: Exception) -> Response:
        return _answer(request, 500, _BROKEN)

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(PipelineError, failed)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, not_served)
    app.add_exception_handler(Exception, broken)  # and then it comes to the root below, which logs it


def _answer(request: Request, status: int, text: str) -> Response:
    path = request.url.path
    if path.startswith(f"{deepstream.PREFIX}/stream/"):
        return deepstream.deepstream_error(path, status, text)
    return error_answer(status, text)


class _Guarded:
    """The root of each request's task: what nobody expected is logged, and answered without its text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception:
            log.exception("api_request_failed", reason="internal", path=scope.get("path", "")[:200])
            if has_begun:
                raise
            await error_answer(500, _BROKEN, is_last=True)(scope, receive, send)
