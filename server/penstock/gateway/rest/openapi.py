"""Declares and documents routes; GET /openapi.json and /docs describe what this gateway serves with its engine."""

import asyncio
import base64
import copy
import hashlib
import inspect
import re
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Security
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from penstock import VERSION
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.rest import schemas
from penstock.gateway.rest.request import TIMEOUT_HEADER
from penstock.gateway.rest.responses import json_response
from penstock.gateway.rest.routes import Limits, Plane, Requires, caller_of
from penstock.protocol.batch_reports import EXPLAIN_HEADER, ModelBatchReport
from penstock.protocol.call import HttpCall, InferHead
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable
from penstock.protocol.identity import ANY_CLIENT, Needed, Role, Verb
from penstock.protocol.image_answer import ImageAnswer
from penstock.protocol.load_reports import (
    LoadComparison,
    LoadRun,
    LoadRunProgress,
    LoadRunRequest,
    LoadRuns,
    LoadScenarios,
)
from penstock.protocol.model_addition import InspectedModel, ModelAdded
from penstock.protocol.model_reports import ModelCheck, ModelReport, ModelsReport
from penstock.protocol.system_reports import AuditReport, FindingsReport, LogReport, SettingsReport, SystemReport

Json = dict[str, Any]
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
JSON, BINARY = "application/json", "application/octet-stream"
_DESCRIPTION = (
    "KServe v2 (Open Inference Protocol) with Triton's extensions, and images as they are encoded. Paths are taken as "
    'they stand on the wire: neither decoded nor merged nor redirected. Every error is {"error": "..."}; what the '
    "engine answers is relayed as it is. The same is served over gRPC, on a port of its own."
)
_REF = "#/components/schemas/"
_SLOT = re.compile(r"\{(\w+)(?::\w+)?\}")
JSON_LENGTH, ENCODING, REQUEST_ID = "Inference-Header-Content-Length", "Content-Encoding", "x-request-id"


def parameter(where: str, name: str, text: str, **schema: Any) -> Json:
    """A parameter as OpenAPI has it. where: path, query or header."""
    return {"name": name, "in": where, "required": where == "path", "description": text, "schema": schema}


_EXPLAIN = "1: the answer says how its batch was formed, in a header of the same name or, for images, as `explain`."
_PARAMETERS = {
    each["name"]: each
    for each in (
        parameter("path", "model", "The model's name, percent-encoded.", type="string", minLength=1),
        parameter("path", "version", "A version's number.", type="string", pattern="^[0-9]+$"),
        parameter("path", "repository", "Any name; it is ignored.", type="string", minLength=1),
        parameter("path", "run", "The id of a load test run.", type="string", pattern="^[a-z0-9-]+$"),
        parameter("path", "region", "A region's name.", type="string", minLength=1),
        parameter(
            "header",
            TIMEOUT_HEADER,
            "Deadline in milliseconds, from the last byte of the body.",
            type="number",
            exclusiveMinimum=0,
        ),
        parameter(
            "header",
            JSON_LENGTH,
            "Length in bytes of the JSON at the start of the decompressed body.",
            type="integer",
            minimum=0,
        ),
        parameter("header", ENCODING, "How the body is compressed.", enum=["identity", "gzip", "deflate"]),
        parameter("header", EXPLAIN_HEADER, _EXPLAIN, enum=["1"]),
        parameter("header", REQUEST_ID, "Returned as `id`.", type="string"),
    )
}
_ERRORS = {
    400: "The request is malformed, or does not match the model.",
    401: "No API key or token, or an unknown one.",
    403: "The client's roles do not allow this.",
    404: "No such model, version, region or load test run.",
    408: "The body arrived too slowly.",
    409: "Another operation of the kind is under way.",
    413: "The body, decompressed or not, or an image exceeds a limit.",
    415: "Unsupported image format.",
    429: "The client's rate limit or quota is exceeded.",
    500: "The engine or the gateway failed.",
    501: "The engine, or this gateway with its settings, does not support this.",
    503: "Overloaded, draining, or the engine is down.",
    504: "The deadline passed.",
    507: "The disk has too little space for the model.",
}
_RETRY_AFTER: Json = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_ERROR_HEADERS: dict[int, Json] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
_REFERENCED = (  # in bodies that FastAPI does not parse
    schemas.Error,
    schemas.InferenceRequest,
    schemas.IndexRequest,
    schemas.LoadRequest,
    schemas.UnloadRequest,
    schemas.SystemRegister,
    schemas.CudaRegister,
    schemas.TraceChange,
    schemas.LogChange,
)
_STRUCTS = (  # what the gateway itself encodes
    InspectedModel,
    ModelAdded,
    ModelBatchReport,
    ModelCheck,
    ModelReport,
    ModelsReport,
    schemas.ServerMetadata,
    ImageAnswer,
    LoadScenarios,
    LoadRunRequest,
    LoadRun,
    LoadRuns,
    LoadRunProgress,
    LoadComparison,
    SystemReport,
    SettingsReport,
    FindingsReport,
    LogReport,
    AuditReport,
)
_ENGINE_TIMEOUT_S = 2.0
_EXTENSION = "x-triton-extension"  # of an operation: the engine extension that it needs


def reference(model: type) -> Json:
    """The schema of one of the document's components."""
    return {"$ref": _REF + model.__name__}


def errors(*statuses: int) -> dict[int | str, Json]:
    """These statuses as FastAPI's `responses`: references to the document's common ones."""
    return {
        status: {"$ref": f"#/components/responses/{_response_name(status)}", "description": _ERRORS[status]}
        for status in statuses
    }


def _response_name(status: int) -> str:
    return HTTPStatus(status).name.title().replace("_", "")


def _error_response(status: int) -> Json:
    """Triton labels some of its JSON errors text/plain."""
    content = {JSON: {"schema": reference(schemas.Error)}, "text/plain": {}}
    return {"description": _ERRORS[status], "content": content, "headers": _ERROR_HEADERS.get(status, {})}


ERRORS = errors(400, 401, 403, 404, 429, 500, 501, 503, 504)  # of every route that needs a role
RECEIVE_ERRORS = errors(408, 413)  # of a route that reads a body


def body(content: Json, *, required: bool = True) -> Json:
    """A request body as OpenAPI has it. content: by media type."""
    return {"requestBody": {"required": required, "content": content}}


def json_body(model: type, *, required: bool = True) -> Json:
    """The same, for a JSON body."""
    return body({JSON: {"schema": reference(model)}}, required=required)


def operation(
    router: APIRouter, method: str, *paths: str, role: Needed | Requires | None, name: str = "", **options: Any
) -> Callable[[Endpoint], Endpoint]:
    """Declares an endpoint under one or more paths; the first line of its docstring is its summary.

    name: its operationId, by default the endpoint's name. FastAPI documents parameters and bodies and does not parse
    them: they are relayed as they are. options: add_api_route's, and for the documentation `headers`, `body` (see
    above), `query` (parameters), `extension` (Triton's, if the engine must have it) and `hidden`, further paths that
    are not documented.
    """
    headers, hidden, extra = options.pop("headers", ()), options.pop("hidden", ()), options.pop("body", {})
    query = options.pop("query", ())
    if extension := options.pop("extension", ""):
        extra = {**extra, _EXTENSION: extension}
    first = _SLOT.findall(paths[0])

    def declare(endpoint: Endpoint) -> Endpoint:
        summary, _, details = inspect.cleandoc(endpoint.__doc__ or "").partition("\n\n")
        documented = {"summary": summary, "description": details, "dependencies": [_dependency(role)], **options}
        for path in (*paths, *hidden):
            slots = _SLOT.findall(path)
            suffix = "".join(f"By{slot.capitalize()}" for slot in slots if slot not in first)
            router.add_api_route(
                path,
                endpoint,
                methods=[method],
                include_in_schema=path not in hidden,
                operation_id=(name or _camel(endpoint.__name__)) + suffix,
                openapi_extra={"parameters": [*(_PARAMETERS[each] for each in (*slots, *headers)), *query], **extra},
                **documented,
            )
        return endpoint

    return declare


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _dependency(role: Needed | Requires | None) -> Any:
    requires = role if isinstance(role, Requires) else Requires(role)
    scopes = [each for each in (requires.role, requires.or_role) if each is not None and each != ANY_CLIENT]
    return Security(requires, scopes=scopes)


def describe(
    app: FastAPI, extensions: frozenset[str] | None, blocked: frozenset[str], open_to: frozenset[Role]
) -> Json:
    """The OpenAPI document. extensions: the engine's, None if unknown. blocked: extensions that are not served here.

    open_to: roles of a client without a key. An operation's `security` has one alternative for each way to show a key
    and each role that suffices.
    """
    document = copy.deepcopy(_document(app))
    for path, operations in list(document["paths"].items()):
        for method, described in list(operations.items()):
            needed = described.get(_EXTENSION)
            if needed in blocked or (needed and extensions is not None and needed not in extensions):
                del operations[method]
            else:
                described["security"] = _alternatives(described.get("security", ()), open_to)
        if not operations:
            del document["paths"][path]
    components = document["components"]
    used = _used_schemas([document["paths"], components["responses"]], components["schemas"])
    components["schemas"] = {name: schema for name, schema in components["schemas"].items() if name in used}
    return document


def _alternatives(security: Iterable[Json], open_to: frozenset[Role]) -> list[Json]:
    schemes = [(scheme, role) for each in security for scheme, roles in each.items() for role in roles]
    optional: list[Json] = [{}] if any(role in open_to for _, role in schemes) else []
    return [{scheme: [role]} for scheme, role in schemes] + optional


def _used_schemas(part: object, schemas: Json) -> set[str]:
    names = set(re.findall(f'"{_REF}(\\w+)"', msgspec.json.encode(part).decode()))
    return names.union(*(_used_schemas(schemas[name], {**schemas, name: {}}) for name in names))


def _document(app: FastAPI) -> Json:
    """FastAPI's document, with the schemas of bodies that FastAPI does not parse."""
    if app.openapi_schema is None:
        document = get_openapi(title="Penstock", version=VERSION, description=_DESCRIPTION, routes=app.routes)
        models: list[tuple[type[BaseModel], Literal["serialization"]]] = [
            (model, "serialization") for model in _REFERENCED
        ]
        _, referenced = models_json_schema(models, ref_template=_REF + "{model}")
        _, structs = msgspec.json.schema_components(_STRUCTS, ref_template=_REF + "{name}")
        for struct in structs.values():
            struct["description"] = inspect.cleandoc(struct["description"])
        document["components"]["schemas"] |= referenced["$defs"] | structs
        document["components"]["responses"] = {_response_name(each): _error_response(each) for each in _ERRORS}
        app.openapi_schema = document
    return app.openapi_schema


router = APIRouter(tags=["description"], responses=ERRORS)


@operation(router, "GET", "/openapi.json", role=Role.READ, response_model=Json)
async def description(request: Request, plane: Plane) -> Response:
    """What is served here.

    What this gateway serves with the engine that is behind it.
    """
    gate = request.app.state.gate
    extensions = await _engine_extensions(request, plane)
    open_to = gate.open_to if gate is not None else frozenset(Role)
    work = asyncio.to_thread(describe, request.app, extensions, plane.blocked_extensions, open_to)
    return json_response(await work)


async def _engine_extensions(request: Request, plane: DataPlane) -> frozenset[str] | None:
    """None if the engine does not answer: then all that may be served is described."""
    call, deadline = HttpCall("GET", b"/v2", (), b""), time.monotonic() + _ENGINE_TIMEOUT_S
    try:
        answer = await plane.relay(Verb.READ, InferHead(""), call, caller=caller_of(request), deadline=deadline)
        return frozenset(msgspec.json.decode(answer.body, type=schemas.ServerMetadata).extensions)
    except (EngineUnavailable, DeadlineExceeded, msgspec.DecodeError):
        return None


pages = APIRouter(include_in_schema=False)


@operation(pages, "GET", "/", role=None)
async def home_page(request: Request, limits: Limits) -> Response:
    """Leads a browser to the console."""
    return limits.home_page.answer(request.scope["scheme"], request.scope["headers"])


@operation(pages, "GET", "/docs", role=None)
async def docs() -> Response:
    """A page that shows /openapi.json, which the browser asks for, with the key that its user enters."""
    page, policy = _page()
    return Response(page, headers={"Content-Security-Policy": policy}, media_type="text/html")


@lru_cache(1)
def _page() -> tuple[bytes, str]:
    """The page, and the policy that lets it run its own script and style, and call its own origin."""
    page = Path(__file__).with_name("docs.html").read_bytes()

    def own(tag: bytes) -> str:
        text = page.partition(b"<%b>" % tag)[2].partition(b"</%b>" % tag)[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"

    policy = f"default-src 'none'; connect-src 'self'; script-src {own(b'script')}; style-src {own(b'style')}"
    return page, f"{policy}; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
