"""What models and their repository are asked, besides inference: relayed."""

from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.core.errors import ModelRefused, NotSupported
from server.core.model import UNMERGED
from server.core.relay import HttpAnswer, InferHead
from server.dataplane import DataPlane, Verb
from server.rest.body import read_body
from server.rest.calls import AnswerResponse, call_of, model_of, with_client_errors
from server.rest.codec import scan_repository_call
from server.rest.deadline import deadline_of
from server.rest.disconnect import run_until_disconnect
from server.rest.errors import error_response, response_of
from server.rest.gate import caller_of
from server.rest.limits import RestLimits
from server.rest.routes import Endpoint
from server.rest.threads import run_scan
from server.rest.unserved import index_with_refusals


class ServerMetadata(msgspec.Struct):
    """GET /v2, in Triton's order."""

    name: str
    version: str
    extensions: list[str]


class ModelEndpoints:
    """Metadata, readiness, configuration, statistics; index, load, unload."""

    def __init__(self, plane: DataPlane, limits: RestLimits) -> None:
        self._plane = plane
        self._limits = limits

    async def server_metadata(self, request: Request) -> Response:
        """The engine's, without the extensions that are not served here."""
        return AnswerResponse(_without(self._plane.blocked_extensions, await self._read(request, b"")))

    async def read(self, request: Request) -> Response:
        """A GET: its body, which the engine would not look at, is left unread."""
        return AnswerResponse(await self._read(request, b""))

    async def index(self, request: Request) -> Response:
        body = await self._json_body(request)
        answer = with_client_errors(await self._read(request, body))
        return AnswerResponse(index_with_refusals(answer, body, self._plane.refusals()))

    async def ready(self, request: Request) -> Response:
        """The engine's answer, except for a model that the engine serves and the gateway does not."""
        answer = await self._read(request, b"")
        error = self._plane.why_withheld(unquote(model_of(request).model_name))
        if error is None or answer.status != 200:
            return AnswerResponse(answer)
        if isinstance(error, ModelRefused):
            return error_response(error.message, 400)  # as Triton answers for a model that failed to load
        return response_of(error)

    async def config(self, request: Request) -> Response:
        """The engine's config, with the reason if the gateway does not merge the model's rows."""
        answer = await self._read(request, b"")
        unmerged = self._plane.batch_options(unquote(model_of(request).model_name)).unmerged
        if answer.status != 200 or not unmerged:
            return AnswerResponse(answer)
        config = msgspec.json.decode(answer.body)
        config.setdefault("parameters", {})[UNMERGED] = {"string_value": unmerged}
        return AnswerResponse(HttpAnswer(answer.status, answer.headers, msgspec.json.encode(config)))

    async def load(self, request: Request) -> Response:
        return await self._change(Verb.LOAD, request)

    async def unload(self, request: Request) -> Response:
        return await self._change(Verb.UNLOAD, request)

    async def _read(self, request: Request, body: bytes) -> HttpAnswer:
        call, deadline = call_of(request, body), deadline_of(request)
        work = self._plane.relay_http(Verb.READ, model_of(request), call, caller=caller_of(request), deadline=deadline)
        return await run_until_disconnect(request.scope, request.receive, work)

    async def _change(self, verb: Verb, request: Request) -> Response:
        """Runs to its end though the client may be gone: the engine would not stop, and we must know the outcome."""
        model: InferHead = model_of(request)
        body = await self._json_body(request)
        call, deadline = call_of(request, body), deadline_of(request)
        answer = await self._plane.relay_http(verb, model, call, caller=caller_of(request), deadline=deadline)
        return AnswerResponse(with_client_errors(answer))

    async def _json_body(self, request: Request) -> bytes:
        body = await read_body(request, self._limits)
        await run_scan(len(body), scan_repository_call, body, self._limits.max_json_depth)
        return body


class Refused:
    """The endpoint of what is not served here: raises NotSupported with the sentence. Not in the API's description."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence

    async def __call__(self, _: Request) -> Response:
        raise NotSupported(self.sentence)


def refused(sentence: str) -> Endpoint:
    """The endpoint that says no with the sentence."""
    return Refused(sentence)


def _without(blocked: frozenset[str], answer: HttpAnswer) -> HttpAnswer:
    """Server metadata that does not tell of these extensions."""
    if answer.status != 200:
        return answer
    metadata = msgspec.json.decode(answer.body, type=ServerMetadata)
    metadata.extensions = [name for name in metadata.extensions if name not in blocked]
    return HttpAnswer(answer.status, answer.headers, msgspec.json.encode(metadata))
