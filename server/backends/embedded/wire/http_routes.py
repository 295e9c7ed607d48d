"""Triton's REST paths, answered by the embedded engine."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from server import VERSION
from server.backends.embedded.engine import EmbeddedEngine
from server.backends.embedded.wire.generate import as_answer, generated, read_generate
from server.backends.embedded.wire.inference import (
    CONFIG,
    infer,
    refuse_load_parameter,
    refuse_repository,
    response_bytes,
)
from server.backends.embedded.wire.json_messages import json_of_message
from server.backends.embedded.wire.server_metadata import EXTENSIONS, NAME, NO_LOG_SETTINGS, NO_TRACE_SETTINGS
from server.backends.wire.errors import plain_error
from server.backends.wire.grpc_messages import metadata_message
from server.backends.wire.http_raw import raw_tensor
from server.backends.wire.http_request import header_length_of, read_infer
from server.backends.wire.http_response import JSON_TYPE, accepted_encoding, infer_answer
from server.backends.wire.threads import in_thread
from server.core.compression import inflate
from server.core.errors import BackendFailed, InvalidRequest, ModelNotReady, NotSupported
from server.core.infer import Parameter
from server.core.model import ModelState
from server.core.relay import HttpAnswer, HttpCall

T = TypeVar("T")

_MODEL = rb"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY = rb"/v2/repository(?:/(?P<repository>[^/]+))?"


class _Index(msgspec.Struct):
    ready: bool = False


class _Load(msgspec.Struct):
    parameters: dict[str, Parameter] = {}


@dataclass(frozen=True, slots=True)
class Visit:
    """A call with what its path says. model and version: empty where the path has none."""

    call: HttpCall
    deadline: float | None
    model: str = ""
    version: str = ""
    repository: str = ""

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name, in lower case."""
        return next((value for known, value in self.call.headers if known == name), None)


class HttpRoutes:
    """One engine's REST side. Raises of the InferenceError tree."""

    def __init__(self, engine: EmbeddedEngine, max_body_bytes: int) -> None:
        self._engine = engine
        self._max_body_bytes = max_body_bytes

    async def answer(self, call: HttpCall, deadline: float | None) -> HttpAnswer:
        """404 and 405, as Triton has them, for what no route takes."""
        path = call.target.partition(b"?")[0]
        is_somewhere = False
        for method, pattern, handle in _ROUTES:
            found = pattern.fullmatch(path)
            if found is None:
                continue
            if call.method != method:
                is_somewhere = True
                continue
            texts = {name: text.decode("utf-8", "replace") for name, text in found.groupdict(b"").items()}
            return await handle(self, Visit(call, deadline, **texts))
        return plain_error(405, "Method Not Allowed") if is_somewhere else plain_error(404, "Not Found")

    async def server(self, _: Visit) -> HttpAnswer:
        return _json({"name": NAME, "version": VERSION, "extensions": EXTENSIONS})

    async def live(self, _: Visit) -> HttpAnswer:
        return HttpAnswer(200, (JSON_TYPE,), b"")

    async def ready(self, _: Visit) -> HttpAnswer:
        is_ready = await self._engine.ready()
        return HttpAnswer(200 if is_ready else 400, (JSON_TYPE,), b"")

    async def metadata(self, visit: Visit) -> HttpAnswer:
        metadata = await self._engine.model_metadata(visit.model, visit.version)
        return _json(json_of_message(metadata_message(metadata)))

    async def model_ready(self, visit: Visit) -> HttpAnswer:
        if await self._engine.ready(visit.model, visit.version):
            return HttpAnswer(200, (JSON_TYPE,), b"")
        return plain_error(400, "Model version not ready")

    async def config(self, visit: Visit) -> HttpAnswer:
        config = self._engine.config_message(visit.model, visit.version)
        return _json(json_of_message(config))

    async def statistics(self, visit: Visit) -> HttpAnswer:
        found = self._engine.statistics(visit.model, visit.version)
        return _json({"model_stats": [json_of_message(entry) for entry in found]})

    async def infer(self, visit: Visit) -> HttpAnswer:
        config = self._engine.config_message(visit.model, visit.version)  # a model that is not there is told first
        body = await self._plain_body(visit)
        length = header_length_of(visit.header(b"inference-header-content-length"))
        ask = await in_thread(len(body) if length is None else length, read_infer, body, length, visit.model)
        if ask.raw is not None:
            ask = replace(ask, inputs=(raw_tensor(ask.raw, config),))
        response = await infer(self._engine, ask, model=visit.model, version=visit.version, deadline=visit.deadline)
        encoding = accepted_encoding(visit.header(b"accept-encoding") or b"")
        return await in_thread(response_bytes(response), infer_answer, response, ask, encoding)

    async def index(self, visit: Visit) -> HttpAnswer:
        is_ready_only = _document(visit.call.body, _Index).ready
        rows = await self._engine.repository_index()
        return _json([_row(row) for row in rows if row.state == "READY" or not is_ready_only])

    async def load(self, visit: Visit) -> HttpAnswer:
        refuse_repository(visit.repository)
        parameters = _document(visit.call.body, _Load).parameters
        for name in parameters:
            refuse_load_parameter(name)
        config = parameters.get(CONFIG)
        if config is not None and not isinstance(config, str):
            raise InvalidRequest("the load parameter 'config' must be a string that holds the configuration as JSON")
        try:
            await self._engine.load(visit.model, config)
        except ModelNotReady as error:
            return plain_error(400, error.message)
        return HttpAnswer(200, (JSON_TYPE,), b"")

    async def unload(self, visit: Visit) -> HttpAnswer:
        refuse_repository(visit.repository)
        await self._engine.unload(visit.model)
        return HttpAnswer(200, (JSON_TYPE,), b"")

    async def generate(self, visit: Visit) -> HttpAnswer:
        return await self._generated(visit, is_stream=False)

    async def generate_stream(self, visit: Visit) -> HttpAnswer:
        """The whole stream: one event, since no model here answers more than once."""
        return await self._generated(visit, is_stream=True)

    async def _generated(self, visit: Visit, *, is_stream: bool) -> HttpAnswer:
        """What the model says against the request comes in the form of an answer, and as Triton's 400."""
        config = self._engine.config_message(visit.model, visit.version)
        if (visit.header(b"content-encoding") or b"identity") != b"identity":
            raise InvalidRequest("Unsupported content-encoding, only 'identity' is supported.")
        body = visit.call.body
        ask = await in_thread(len(body), read_generate, body, config)
        try:
            response = await infer(self._engine, ask, model=visit.model, version=visit.version, deadline=visit.deadline)
        except BackendFailed as error:
            return as_answer(msgspec.json.encode({"error": error.message}), status=400, is_stream=is_stream)
        text = await in_thread(response_bytes(response), generated, response)
        return as_answer(text, status=200, is_stream=is_stream)

    async def trace_settings(self, _: Visit) -> HttpAnswer:
        """Raises NotSupported."""
        raise NotSupported(NO_TRACE_SETTINGS)

    async def log_settings(self, _: Visit) -> HttpAnswer:
        """Raises NotSupported."""
        raise NotSupported(NO_LOG_SETTINGS)

    async def _plain_body(self, visit: Visit) -> bytes:
        body = visit.call.body
        encoding = (visit.header(b"content-encoding") or b"").decode("latin-1").strip().lower()
        return await in_thread(len(body) if encoding else 0, inflate, body, encoding, self._max_body_bytes)


_ROUTES: tuple[tuple[str, re.Pattern[bytes], Callable[[HttpRoutes, Visit], Awaitable[HttpAnswer]]], ...] = tuple(
    (method, re.compile(path), handle)
    for method, path, handle in (
        ("POST", _MODEL + rb"/infer", HttpRoutes.infer),
        ("GET", rb"/v2", HttpRoutes.server),
        ("GET", rb"/v2/health/live", HttpRoutes.live),
        ("GET", rb"/v2/health/ready", HttpRoutes.ready),
        ("GET", rb"/v2/models/stats", HttpRoutes.statistics),
        ("GET", _MODEL, HttpRoutes.metadata),
        ("GET", _MODEL + rb"/ready", HttpRoutes.model_ready),
        ("GET", _MODEL + rb"/config", HttpRoutes.config),
        ("GET", _MODEL + rb"/stats", HttpRoutes.statistics),
        ("POST", _REPOSITORY + rb"/index", HttpRoutes.index),
        ("POST", _REPOSITORY + rb"/models/(?P<model>[^/]+)/load", HttpRoutes.load),
        ("POST", _REPOSITORY + rb"/models/(?P<model>[^/]+)/unload", HttpRoutes.unload),
        ("POST", _MODEL + rb"/generate", HttpRoutes.generate),
        ("POST", _MODEL + rb"/generate_stream", HttpRoutes.generate_stream),
        ("GET", rb"/v2(?:/models/[^/]+)?/trace/setting", HttpRoutes.trace_settings),
        ("GET", rb"/v2/logging", HttpRoutes.log_settings),
        ("POST", rb"/v2(?:/models/[^/]+)?/trace/setting", HttpRoutes.trace_settings),
        ("POST", rb"/v2/logging", HttpRoutes.log_settings),
    )
)


def _json(content: object) -> HttpAnswer:
    return HttpAnswer(200, (JSON_TYPE,), msgspec.json.encode(content))


def _document(body: bytes, kind: type[T]) -> T:
    """The body as that kind; its defaults where there is no body. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error


def _row(row: ModelState) -> dict[str, str]:
    """As Triton writes it: what is empty is left out, but for the name."""
    told = {"name": row.name, "version": row.version, "state": row.state, "reason": row.reason}
    return {key: value for key, value in told.items() if value or key == "name"}
