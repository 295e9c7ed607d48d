"""Trace and log settings: read, and changed, where the engine has them. Files are not theirs to name."""

from starlette.requests import Request
from starlette.responses import Response

from server.core.relay import HttpAnswer
from server.dataplane import DataPlane, Verb
from server.rest.body import read_body
from server.rest.calls import AnswerResponse, call_of, model_of, with_client_errors
from server.rest.codec import scan_settings
from server.rest.deadline import deadline_of
from server.rest.disconnect import run_until_disconnect
from server.rest.gate import caller_of
from server.rest.limits import RestLimits
from server.rest.threads import run_scan


class SettingsEndpoints:
    """GET and POST of …/trace/setting and /v2/logging."""

    def __init__(self, plane: DataPlane, limits: RestLimits) -> None:
        self._plane = plane
        self._limits = limits

    async def __call__(self, request: Request) -> Response:
        """The settings, after the change where it is a POST; that runs to its end though the client may be gone."""
        if request.method == "GET":
            # Its body, which the engine would not look at, is left unread.
            return AnswerResponse(
                await run_until_disconnect(request.scope, request.receive, self._relay(Verb.READ, request, b""))
            )
        body = await read_body(request, self._limits)
        await run_scan(len(body), scan_settings, body, self._limits.max_json_depth)
        return AnswerResponse(with_client_errors(await self._relay(Verb.CONFIGURE, request, body)))

    async def _relay(self, verb: Verb, request: Request, body: bytes) -> HttpAnswer:
        model, call, deadline = model_of(request), call_of(request, body), deadline_of(request)
        return await self._plane.relay_http(verb, model, call, caller=caller_of(request), deadline=deadline)
