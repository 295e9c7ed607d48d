"""The FastAPI application of the control API: its request checks, health and metrics routes, and error responses."""

import base64
import binascii
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.port_policy import host_fault, remote_client
from penstock.protocol.errors import (
    HostNotAllowed,
    InferenceError,
    OriginNotAllowed,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    UnsupportedMedia,
)
from penstock.protocol.identity import Role
from penstock.tls import subject_of
from penstock_video.api import deepstream
from penstock_video.api import routes as streams
from penstock_video.api.calls import Calls, Refusal, error_response, status_of
from penstock_video.api.events import events_router, source_router
from penstock_video.api.models import Health, named_faults
from penstock_video.api.options import CERTIFICATE, CLIENT, DENIED, REMOTE, Access, ApiOptions, Audited
from penstock_video.api.page import FIRST_PICTURE_S, Viewers, page_router, previews_router
from penstock_video.errors import PipelineError
from penstock_video.interfaces import PipelineControl, Previews
from penstock_video.store.reader import EventArchive

READY_TIMEOUT_S = 2.0
_TEXT: dict[int | str, dict[str, object]] = {200: {"content": {"text/plain": {}}}}
_NOT_READY: dict[int | str, dict[str, object]] = {503: {"model": Health}}


def health_router(control: PipelineControl, page: Callable[[], bytes], content_type: str) -> tuple[APIRouter, Calls]:
    """Routes health/live, health/ready and metrics, and their calls, to be closed. page: the metrics' text."""
    router = APIRouter(tags=["health"])
    calls = Calls(4, READY_TIMEOUT_S)

    @router.get("/health/live", response_model_exclude_none=True, summary="Whether the API answers.")
    async def live() -> Health:
        return Health()

    @router.get("/health/ready", response_model=Health, responses=_NOT_READY, summary="Whether the pipeline works.")
    async def ready() -> Response:
        try:
            is_healthy = await calls.run(control.is_healthy)
        except Refusal:
            is_healthy = False
        return JSONResponse(Health(ready=is_healthy).model_dump(), status_code=200 if is_healthy else 503)

    @router.get("/metrics", response_class=Response, responses=_TEXT, summary="In Prometheus' text format.")
    async def metrics() -> Response:
        return Response(await calls.run(page), media_type=content_type)

    return router, calls


OPEN_PATHS = ("/health/live", "/health/ready")  # for probes, which have no key
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
_STATUS = {HostNotAllowed: 421, OriginNotAllowed: 403, UnsupportedMedia: 415}
_REFUSED = {Unauthenticated: 401, PermissionDenied: 403, QuotaExceeded: 429}  # others: 503
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's head. Header names are in lower case."""

    method: str
    path: str
    headers: Headers
    http_version: str = "1.1"

    def one(self, name: bytes) -> str:
        """A header's value, empty if missing. Raises Refusal if it is repeated."""
        found = [value for key, value in self.headers if key == name]
        if len(found) > 1:
            raise Refusal(400, f"the header {name.decode()} is there {len(found)} times; send it once")
        return found[0].decode("latin-1").strip() if found else ""

    @property
    def is_changing(self) -> bool:
        return self.method not in ("GET", "HEAD", "OPTIONS")


async def check(asked: RequestHead, options: ApiOptions, scope: Scope) -> None:
    """Raises Refusal for a request that is not served. Notes the client, or why it is refused, in the scope."""
    if fault := host_fault(b"", asked.http_version, asked.headers):
        raise Refusal(400, fault)
    is_open = asked.path in OPEN_PATHS
    if options.access is not None and not is_open:
        await _admit(asked, options.access, scope)
    scope[REMOTE] = remote_client(asked.headers)
    try:
        if options.access is None and not is_open:
            options.browser_policy.check_without_keys(asked.headers)
        options.browser_policy.check(
            asked.method,
            asked.headers,
            local_address=str((scope.get("server") or ("",))[0]),
            is_trusted=is_open or bool(scope.get(CLIENT)),
        )
    except (HostNotAllowed, OriginNotAllowed, UnsupportedMedia) as error:
        raise Refusal(_STATUS[type(error)], str(error)) from None
    length = asked.one(b"content-length")
    if length.isdecimal() and int(length) > options.max_body_bytes:
        raise Refusal(413, f"a body of {length} bytes (at most {options.max_body_bytes})")


async def _admit(asked: RequestHead, access: Access, scope: Scope) -> None:
    """Raises Refusal unless the client has the role: `read`, or `admin` for a change."""
    role = Role.ADMIN if asked.is_changing else Role.READ
    certificate: bytes = scope.get(CERTIFICATE, b"")
    try:
        subject = subject_of(certificate) if certificate else ""
        caller = await access.admit(list(_credentials(asked)), role, certificate=subject)
    except InferenceError as error:
        if isinstance(error, Unauthenticated | PermissionDenied):
            scope[DENIED], scope[CLIENT] = error.reason, error.client
        raise Refusal(_REFUSED.get(type(error), 503), str(error)) from None
    scope[CLIENT] = caller.key_name


def _credentials(asked: RequestHead) -> Iterator[str]:
    """Keys and tokens of the request. Raises Refusal for a repeated header, Unauthenticated for another scheme."""
    if key := asked.one(b"x-api-key"):
        yield key
    scheme, _, rest = asked.one(b"authorization").partition(" ")
    if scheme.lower() == "bearer":
        yield rest.strip()
    elif scheme.lower() == "basic":
        yield _password_of(rest.strip())
    elif scheme:
        raise Unauthenticated("`authorization` is neither `Bearer …` nor `Basic …`; send the API key that way")


def _password_of(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode("utf-8", "replace").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


class RequestGuard:
    """Passes a request to the app with its whole body, within a limit, or refuses it."""

    def __init__(self, app: ASGIApp, options: ApiOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_ALWAYS]
            await send(message)

        asked = RequestHead(scope["method"], scope["path"], scope["headers"], scope["http_version"])
        try:
            await check(asked, self._options, scope)
            body = await _read(receive, self._options.max_body_bytes) if asked.is_changing else b""
        except Refusal as refusal:
            await error_response(refusal.status, refusal.text, is_last=True)(scope, receive, send_more)
            return
        if body is None:
            return
        if asked.is_changing:  # `curl -d` sends JSON as a form; forms from browsers were refused before
            others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        await self._app(scope, _Replayed(body, receive) if asked.is_changing else receive, send_more)


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The whole body; None if the client left. Raises Refusal if it is too long."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise Refusal(413, f"a body of more than {limit} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


class _Replayed:
    """Replays the body once, then the connection's messages."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


log = structlog.get_logger(component="video")

CALLS_AT_ONCE = 32
_STILLS_AT_ONCE = 16
PROBES_AT_ONCE, PROBE_TIMEOUT_S = 2, 40.0  # each starts a process; it ends by itself before
EVENT_CALLS_AT_ONCE = 32  # a console loads many snapshots at once
_BROKEN = "the API failed; its log says why"


@dataclass(frozen=True, slots=True)
class ApiApp:
    """The ASGI app and the calls that it makes, closed when the server stops, so that no client waits."""

    app: ASGIApp
    calls: Sequence[Calls]

    def close(self) -> None:
        """Answers waiting clients and ends the moving previews. Runs in the loop."""
        for each in self.calls:
            each.close()


def create_app(
    control: PipelineControl,
    previews: Previews,
    metrics: Callable[[], bytes],
    options: ApiOptions,
    content_type: str,
    archive: EventArchive | None = None,
) -> ApiApp:
    """The app with every route of the pipeline. metrics: the text; content_type: its type. archive: None without a
    store of events."""
    calls = Calls(CALLS_AT_ONCE, options.call_timeout_s)
    probes = Calls(PROBES_AT_ONCE, PROBE_TIMEOUT_S)
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
    app.include_router(streams.streams_router(control, calls, probes, options), responses=streams.ERRORS)
    app.include_router(
        previews_router(control, previews, watching, Viewers(options.max_viewers)), responses=streams.ERRORS
    )
    asking_events = Calls(EVENT_CALLS_AT_ONCE, options.call_timeout_s)
    app.include_router(events_router(archive, asking_events), responses=streams.ERRORS)
    app.include_router(source_router(archive, control, asking_events), responses=streams.ERRORS)
    app.include_router(deepstream.deepstream_router(control, calls, options), responses=deepstream.DEEPSTREAM_ERRORS)
    app.include_router(page_router(control, calls))
    _add_errors(app)
    guarded: ASGIApp = _Guarded(_with_cors(RequestGuard(app, options), options))
    if options.audit is not None:
        guarded = Audited(guarded, options.audit)
    return ApiApp(guarded, (calls, probes, watching, asking, asking_events))


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
    return error_response(status, text)


class _Guarded:
    """The root of each request's task: an unexpected exception is logged, and answered without its text."""

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
            await error_response(500, _BROKEN, is_last=True)(scope, receive, send)
