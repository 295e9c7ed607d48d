"""What a front does not serve itself: passed on to the core as it came, and its answer passed back as it comes."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.backends.core_relay import CoreRelay
from server.core.caller import Caller
from server.core.errors import InferenceError
from server.core.headers import HOP_BY_HOP, end_to_end
from server.core.relay import HttpCall
from server.logs import get_logger
from server.rest.body import read_body
from server.rest.calls import call_of
from server.rest.deadline import deadline_of
from server.rest.disconnect import run_until_disconnect
from server.rest.errors import CLIENT_GONE, ClientDisconnected
from server.rest.gate import caller_of
from server.rest.limits import RestLimits
from server.rest.recorder import RequestRecorder

LATE_S = 0.25  # beyond a deadline, which the core keeps itself, before a core that says nothing is given up

log = get_logger("rest")


@dataclass(frozen=True, slots=True)
class WayToCore:
    """Of a front. has_engine: whether the engine lives in the core's process, so that pictures are decoded there."""

    core: CoreRelay
    has_engine: bool


class PassedOn:
    """The endpoint of such a row. What a GET's body holds is left unread, as the core would leave it."""

    def __init__(self, core: CoreRelay, limits: RestLimits, record: RequestRecorder) -> None:
        self._core = core
        self._limits = limits
        self._record = record

    async def __call__(self, request: Request) -> Response:
        body = b"" if request.method == "GET" else await read_body(request, self._limits)
        return _Passed(self._core, call_of(request, body), _Asker(caller_of(request), _until(request)), self._record)


def _until(request: Request) -> float | None:
    """A moment after the client's deadline; None where it set none that the core would take."""
    try:
        deadline = deadline_of(request)
    except InferenceError:
        return None
    return None if deadline is None else deadline + LATE_S


@dataclass(frozen=True, slots=True)
class _Asker:
    """Who asked, and when the core is not waited for any more: monotonic seconds, None for no end."""

    caller: Caller
    until: float | None


class _Passed(Response):
    """The core's answer, piece by piece. A client that leaves ends the call to the core."""

    def __init__(self, core: CoreRelay, call: HttpCall, asker: _Asker, record: RequestRecorder) -> None:
        self._core = core
        self._call = call
        self._asker = asker
        self._record = record
        self._has_begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(scope, receive, self._relay(send))
        except ClientDisconnected:
            if not self._has_begun:
                raise
            await Response(status_code=CLIENT_GONE)(scope, receive, send)  # not sent any more; it is counted
        except InferenceError as error:
            if not self._has_begun:
                raise
            self._record.rejected(error.reason)  # an answer that does not end well is cut with its connection
            log.debug("answer broken off", reason=error.reason, error=error.message)

    async def _relay(self, send: Send) -> None:
        asker = self._asker
        stream = await self._core.http_stream(self._call, asker.caller, deadline=asker.until)
        try:
            self._has_begun = True
            headers = list(end_to_end(stream.headers, HOP_BY_HOP))
            await send({"type": "http.response.start", "status": stream.status, "headers": headers})
            async for piece in stream.chunks:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await stream.chunks.aclose()
