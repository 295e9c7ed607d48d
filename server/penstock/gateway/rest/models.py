"""Endpoints other than inference: health, model metadata, config, statistics, batching, repository, trace and log
settings.

They are relayed to the engine, except health and /explain.
"""

from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.batching.explanation import EXPLAIN_HEADER, RequestExplanation, explain_batched, is_requested
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.rest.limits import RestLimits
from penstock.gateway.rest.request import (
    RelayedResponse,
    call_of,
    deadline_of,
    model_of,
    read_body,
    run_scan,
    run_until_disconnect,
    with_client_errors,
)
from penstock.gateway.rest.responses import error_response, json_response, response_of
from penstock.gateway.rest.routes import RouteEndpoint, caller_of
from penstock.protocol.call import HttpAnswer, InferHead
from penstock.protocol.engine import UNMERGED
from penstock.protocol.errors import ModelRefused, NotSupported, retry_after_whole_s
from penstock.protocol.http_codec import check_repository_body, check_settings_body, index_with_refusals
from penstock.protocol.identity import Verb
from penstock.vision.results import ImageResponse


class HealthEndpoints:
    """With a JSON body, which KServe's client reads and Triton's ignores."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def live(self, _: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, _: Request) -> Response:
        readiness = self._plane.readiness()
        if readiness.is_ready:
            return json_response({"ready": True})
        content = {"ready": False, "reason": readiness.reason, "error": f"not ready: {readiness.reason}"}
        return json_response(content, 503, {"Retry-After": str(retry_after_whole_s(1.0))})


class ExplainEndpoint:
    """Ours, beside v2's: the queue, the fit, the batches, and what Triton would need to form them."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def __call__(self, request: Request) -> Response:
        model_name = unquote(model_of(request).model_name)
        work = self._plane.explain_model(model_name, caller_of(request))
        return json_response(await run_until_disconnect(request.scope, request.receive, work))


def explain_images(plane: DataPlane, request: Request, response: ImageResponse) -> list[RequestExplanation]:
    """Explanations for an image request: one per image that the gateway batched, else one that names the batch owner.

    Empty if the client did not request them.
    """
    if not is_requested(request.headers.get(EXPLAIN_HEADER, "")):
        return []
    explained = [explain_batched(explanation) for explanation in response.explanations]
    return explained or [plane.not_formed(InferHead(response.model_name, response.model_version))]


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
        return RelayedResponse(_without_extensions(self._plane.blocked_extensions, await self._read(request, b"")))

    async def read(self, request: Request) -> Response:
        """A GET: its body, which the engine would not look at, is left unread."""
        return RelayedResponse(await self._read(request, b""))

    async def index(self, request: Request) -> Response:
        body = await self._json_body(request)
        answer = with_client_errors(await self._read(request, body))
        return RelayedResponse(index_with_refusals(answer, body, self._plane.refusals()))

    async def ready(self, request: Request) -> Response:
        """The engine's answer, except for a model that the engine serves and the gateway does not."""
        answer = await self._read(request, b"")
        error = self._plane.why_withheld(unquote(model_of(request).model_name))
        if error is None or answer.status != 200:
            return RelayedResponse(answer)
        if isinstance(error, ModelRefused):
            return error_response(error.message, 400)  # as Triton answers for a model that failed to load
        return response_of(error)

    async def config(self, request: Request) -> Response:
        """The engine's config, with the reason if the gateway does not merge the model's rows."""
        answer = await self._read(request, b"")
        unmerged = self._plane.batch_options(unquote(model_of(request).model_name)).unmerged
        if answer.status != 200 or not unmerged:
            return RelayedResponse(answer)
        config = msgspec.json.decode(answer.body)
        config.setdefault("parameters", {})[UNMERGED] = {"string_value": unmerged}
        return RelayedResponse(HttpAnswer(answer.status, answer.headers, msgspec.json.encode(config)))

    async def load(self, request: Request) -> Response:
        return await self._change(Verb.LOAD, request)

    async def unload(self, request: Request) -> Response:
        return await self._change(Verb.UNLOAD, request)

    async def _read(self, request: Request, body: bytes) -> HttpAnswer:
        call, deadline = call_of(request, body), deadline_of(request)
        work = self._plane.relay(Verb.READ, model_of(request), call, caller=caller_of(request), deadline=deadline)
        return await run_until_disconnect(request.scope, request.receive, work)

    async def _change(self, verb: Verb, request: Request) -> Response:
        """Runs to its end though the client may be gone: the engine would not stop, and we must know the outcome."""
        model: InferHead = model_of(request)
        body = await self._json_body(request)
        call, deadline = call_of(request, body), deadline_of(request)
        answer = await self._plane.relay(verb, model, call, caller=caller_of(request), deadline=deadline)
        return RelayedResponse(with_client_errors(answer))

    async def _json_body(self, request: Request) -> bytes:
        body = await read_body(request, self._limits)
        await run_scan(len(body), check_repository_body, body, self._limits.max_json_depth)
        return body


class NotServedEndpoint:
    """The endpoint of what is not served here: raises NotSupported with the sentence. Not in the API's description."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence

    async def __call__(self, _: Request) -> Response:
        raise NotSupported(self.sentence)


def not_served(sentence: str) -> RouteEndpoint:
    """The endpoint that says no with the sentence."""
    return NotServedEndpoint(sentence)


def _without_extensions(blocked: frozenset[str], answer: HttpAnswer) -> HttpAnswer:
    """Server metadata that does not tell of these extensions."""
    if answer.status != 200:
        return answer
    metadata = msgspec.json.decode(answer.body, type=ServerMetadata)
    metadata.extensions = [name for name in metadata.extensions if name not in blocked]
    return HttpAnswer(answer.status, answer.headers, msgspec.json.encode(metadata))


class SettingsEndpoints:
    """GET and POST of …/trace/setting and /v2/logging."""

    def __init__(self, plane: DataPlane, limits: RestLimits) -> None:
        self._plane = plane
        self._limits = limits

    async def __call__(self, request: Request) -> Response:
        """The settings, after the change where it is a POST; that runs to its end though the client may be gone."""
        if request.method == "GET":
            # Its body, which the engine would not look at, is left unread.
            return RelayedResponse(
                await run_until_disconnect(request.scope, request.receive, self._relay(Verb.READ, request, b""))
            )
        body = await read_body(request, self._limits)
        await run_scan(len(body), check_settings_body, body, self._limits.max_json_depth)
        return RelayedResponse(with_client_errors(await self._relay(Verb.CONFIGURE, request, body)))

    async def _relay(self, verb: Verb, request: Request, body: bytes) -> HttpAnswer:
        model, call, deadline = model_of(request), call_of(request, body), deadline_of(request)
        return await self._plane.relay(verb, model, call, caller=caller_of(request), deadline=deadline)
