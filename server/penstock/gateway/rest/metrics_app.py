"""The application of the metrics port: the gateway's and the engine's metrics in Prometheus text format."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.rest.responses import response_of
from penstock.gateway.rest.routes import RequestAuthentication, with_cors
from penstock.protocol.errors import InferenceError
from penstock.protocol.identity import Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_metrics_app(
    own: Callable[[], bytes],
    engine: Callable[[], Awaitable[bytes]],
    is_engine_up: Callable[[], bool],
    *,
    gate: RequestAuthentication | None = None,
) -> ASGIApp:
    """GET /metrics: both (penstock_… and the engine's nv_…); /metrics/penstock and /metrics/engine: one of them.

    own: our text. engine: the engine's text, empty where it has none or does not answer. is_engine_up: else it is not
    queried for /metrics, because an engine that hangs would delay the scrapes that report it. gate: checks the Host
    and Origin of each request, and its key if the gate checks keys (role `read`).
    """

    async def both(_: Request) -> Response:
        return Response(own() + (await engine() if is_engine_up() else b""), media_type=CONTENT_TYPE)

    async def ours(_: Request) -> Response:
        return Response(own(), media_type=CONTENT_TYPE)

    async def engines(_: Request) -> Response:
        return Response(await engine(), media_type=CONTENT_TYPE)

    async def not_found(request: Request, _: Exception) -> Response:
        text = f"no such page: {request.url.path!r}; there are /metrics, /metrics/penstock and /metrics/engine"
        return JSONResponse({"error": text}, status_code=404)

    async def wrong_method(request: Request, _: Exception) -> Response:
        return JSONResponse({"error": f"{request.method} is not served here, GET is"}, status_code=405)

    pages = Starlette(
        routes=[Route("/metrics", both), Route("/metrics/penstock", ours), Route("/metrics/engine", engines)],
        exception_handlers={404: not_found, 405: wrong_method},
    )
    if gate is None:
        return pages
    return with_cors(_Authenticated(pages, gate), gate.cors_origins)


class _Authenticated:
    """The pages, with the gate's checks."""

    def __init__(self, pages: ASGIApp, gate: RequestAuthentication) -> None:
        self._pages = pages
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._gate.admit(scope, Role.READ)
        except InferenceError as error:
            await response_of(error)(scope, receive, send)
            return
        await self._pages(scope, receive, send)
