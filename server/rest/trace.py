"""The outermost layer of a traced gateway: a trace a request, from its head to the end of its answer."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.rest.routes import WireRoute
from server.tracing.trace import PARENT_HEADERS, Tracer, current_trace

_PROTOCOL = "http"
_HEALTH = "/v2/health/"
_PARENTS = {name.encode(): name for name in PARENT_HEADERS}


class Traced:
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
            trace.end(_name_of(scope), code=status, is_error=status == 0 or status >= 500)


def _name_of(scope: Scope) -> str:
    """The method and the row of the table, not the path: names are few."""
    route = scope.get("route")
    return f"{scope['method']} {route.row.path}" if isinstance(route, WireRoute) else f"{scope['method']} (no route)"
