"""POST …/generate and …/generate_stream: JSON in, JSON or server-sent events out, relayed as they come."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.core.caller import Caller
from server.core.errors import InferenceError, InvalidRequest
from server.core.headers import HOP_BY_HOP, end_to_end
from server.core.relay import HttpAnswer, HttpCall, HttpStream, InferHead
from server.dataplane import DataPlane, Verb
from server.rest.body import read_body, single_header
from server.rest.calls import AnswerResponse, call_of, model_of, with_client_errors
from server.rest.codec import scan_generate
from server.rest.deadline import deadline_of
from server.rest.disconnect import run_until_disconnect
from server.rest.errors import CLIENT_GONE, ClientDisconnected
from server.rest.gate import caller_of
from server.rest.limits import RestLimits
from server.rest.recorder import RequestRecorder
from server.rest.threads import run_scan

JSON = b"application/json"


class GenerateEndpoints:
    """A model's inputs by their names, its outputs likewise; the engine knows which is which."""

    def __init__(self, plane: DataPlane, limits: RestLimits, record: RequestRecorder) -> None:
        self._plane = plane
        self._limits = limits
        self._record = record

    async def generate(self, request: Request) -> Response:
        """One answer, whole."""
        head, call = await self._read(request)
        work = self._plane.relay_http(Verb.INFER, head, call, caller=caller_of(request), deadline=deadline_of(request))
        return AnswerResponse(with_client_errors(await run_until_disconnect(request.scope, request.receive, work)))

    async def stream(self, request: Request) -> Response:
        """Event by event."""
        head, call = await self._read(request)
        return _Events(self._plane, self._record, head, call, _Asker(caller_of(request), deadline_of(request)))

    async def _read(self, request: Request) -> tuple[InferHead, HttpCall]:
        body = await read_body(request, self._limits)
        if single_header(request, "content-encoding") not in ("", "identity"):
            raise InvalidRequest("Unsupported content-encoding, only 'identity' is supported.")  # Triton's words
        head = await run_scan(len(body), scan_generate, body, model_of(request), self._limits.max_json_depth)
        return head, call_of(request, body)


class _Asker(msgspec.Struct, frozen=True):
    """Who asked, and until when the answer is of use: monotonic seconds, None for no end."""

    caller: Caller
    deadline: float | None


class _Events(Response):
    """The engine's answer piece by piece, each sent before the next is taken.

    Once it has begun, what goes wrong is told as one more event, in Triton's form. A client that leaves ends the
    engine's work.
    """

    def __init__(
        self, plane: DataPlane, record: RequestRecorder, head: InferHead, call: HttpCall, asker: _Asker
    ) -> None:
        self._plane = plane
        self._record = record
        self._head = head
        self._call = call
        self._asker = asker
        self._has_begun = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(scope, receive, self._relay(scope, receive, send))
        except ClientDisconnected:
            if not self._has_begun:
                raise
            await Response(status_code=CLIENT_GONE)(scope, receive, send)  # not sent any more; it is counted
        except InferenceError as error:
            if not self._has_begun:
                raise
            self._record.rejected(error.reason)
            await _send_error(send, error.message)
        except asyncio.CancelledError:  # the grace of a drain is over
            if self._has_begun:
                await _send_error(send, "this gateway stopped before the answer ended; send to another one")
            raise

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        asker = self._asker
        async with self._plane.stream_http(
            self._head, self._call, caller=asker.caller, deadline=asker.deadline
        ) as stream:
            if _is_plain_error(stream):
                answer = HttpAnswer(stream.status, stream.headers, b"".join([piece async for piece in stream.chunks]))
                await AnswerResponse(with_client_errors(answer))(scope, receive, send)
                return
            self._has_begun = True
            await send({"type": "http.response.start", "status": stream.status, "headers": _headers(stream)})
            async for piece in stream.chunks:
                await _send_piece(send, piece)
        await _send_end(send)


def _is_plain_error(stream: HttpStream) -> bool:
    """Whether the engine refused the request, at its usual length, before any event."""
    return stream.status >= 400 and (b"content-type", JSON) in stream.headers


def _headers(stream: HttpStream) -> list[tuple[bytes, bytes]]:
    return list(end_to_end(stream.headers, HOP_BY_HOP | {b"content-length"}))


async def _send_piece(send: Send, piece: bytes) -> None:
    """Returns when the client's side has room for more."""
    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _send_error(send: Send, text: str) -> None:
    await _send_piece(send, b"data: %s\n\n" % msgspec.json.encode({"error": text}))
    await _send_end(send)


async def _send_end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})
