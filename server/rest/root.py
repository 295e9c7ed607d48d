"""The outermost layer of ours: what nobody else caught, what nobody else counts, and bodies that nobody read."""

import asyncio
import time
import traceback

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.dataplane import DataPlane
from server.logs import get_logger
from server.rest.errors import CLIENT_GONE, error_response
from server.rest.protocol import ANSWER_IS_COUNTED
from server.rest.recorder import RequestRecorder
from server.rest.routes import WireRoute

LINGER_S = 1.0
WATCHED_FROM_BYTES = 1 << 20
_PROTOCOL = "http"

log = get_logger("rest")


class Root:
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
        if isinstance(route, WireRoute) and route.row.is_inference:
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
        """The body is whole, or nobody waits for it any more."""
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
