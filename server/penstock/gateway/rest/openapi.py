"""GET /openapi.json: the operations that this gateway serves with its engine, as an OpenAPI 3.1 document."""

import inspect
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from penstock import VERSION
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.rest.models import NotServedEndpoint, ServerMetadata
from penstock.gateway.rest.operations import BINARY, JSON, MULTIPART, OPERATIONS, TEXT, Content, Header, Operation
from penstock.gateway.rest.responses import json_response
from penstock.gateway.rest.routes import OPTIONAL_PART, PATH_PARAMETER, RawPathRoute, RouteSpec, caller_of
from penstock.gateway.rest.schemas import Error
from penstock.protocol.call import HttpCall, InferHead
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable
from penstock.protocol.identity import Role, Verb

Json = dict[str, object]

_VERSION = "3.1.0"
_REF = "#/components/schemas/{name}"
_REFUSALS = {
    400: "Malformed, or not what the model takes.",
    401: "No API key or token, or an unknown one.",
    403: "The caller's roles do not allow this.",
    404: "No such model, version or region.",
    408: "The body did not arrive in its time.",
    413: "The body, its decompressed form or an image is over the limit.",
    415: "Not an image format that is taken here.",
    429: "The caller's own rate or share is used up.",
    500: "The engine failed, or this gateway did.",
    501: "The engine, or this gateway as it was started, cannot do that.",
    503: "Full, draining, or the engine is down.",
    504: "The deadline passed.",
}
_DESCRIPTION = (
    "KServe v2 (Open Inference Protocol) with Triton's extensions, and images as they are encoded. Paths are taken as "
    'they stand on the wire: neither decoded nor merged nor redirected. Every error is {"error": "..."}; what the '
    "engine answers is relayed as it is. The same is served over gRPC, on a port of its own."
)
_COMMON_ERRORS = (400, 404, 500, 501, 503, 504)
_ACCESS_ERRORS = (401, 403, 429)
_WHOLE_NUMBER: Json = {"type": "integer", "minimum": 0}
_RETRY_AFTER: Json = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_ANSWER_HEADERS: dict[int, Json] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
_HEADERS: dict[Header, tuple[str, Json]] = {
    Header.TIMEOUT: (
        "Milliseconds that the caller waits, from the body's last byte on.",
        {"type": "number", "exclusiveMinimum": 0},
    ),
    Header.JSON_LENGTH: ("Bytes of JSON at the decompressed body's start.", {"type": "integer", "minimum": 0}),
    Header.ENCODING: ("How the body is compressed.", {"enum": ["identity", "gzip", "deflate"]}),
    Header.EXPLAIN: (
        "1: the answer says how its batch was formed, in a header of the same name or, for images, as `explain`.",
        {"enum": ["1"]},
    ),
    Header.REQUEST_ID: ("Comes back as `id`.", {"type": "string"}),
}
_SLOTS: dict[str, tuple[str, Json]] = {
    "model": ("As the path has it: percent-encoded where it must be.", {"type": "string", "minLength": 1}),
    "version": ("A version's number.", {"type": "string", "pattern": "^[0-9]+$"}),
    "repository": ("Any name: there is one repository.", {"type": "string", "minLength": 1}),
    "region": ("A region's name.", {"type": "string", "minLength": 1}),
}
_FORM: Json = {
    "type": "object",
    "properties": {
        "image": {
            "type": "array",
            "items": {"type": "string", "format": "binary", "contentMediaType": "image/*"},
            "minItems": 1,
        }
    },
    "required": ["image"],
}
_SCHEMES: Json = {
    "ApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "Bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token."},
}


def document(operations: Iterable[Operation], open_to: frozenset[Role]) -> Json:
    """OpenAPI 3.1. open_to: the roles of a caller that does not say who it is."""
    schemas = _Schemas()
    paths: dict[str, Json] = {}
    for operation in operations:
        for path in expand_optional_parts(operation.path):
            described = _operation(operation, path, schemas)
            described["security"] = _security(operation, open_to)
            paths.setdefault(path, {})[operation.method.lower()] = described
    refusals = {_name(status): _refusal(status, schemas) for status in _REFUSALS}
    return {
        "openapi": _VERSION,
        "info": {"title": "Penstock", "version": VERSION, "description": _DESCRIPTION},
        "paths": paths,
        "components": {"schemas": schemas.components, "responses": refusals, "securitySchemes": _SCHEMES},
    }


def expand_optional_parts(template: str) -> tuple[str, ...]:
    """The paths that a template stands for: without its optional piece and, where it has one, with it."""
    with_piece = OPTIONAL_PART.sub(r"\1", template)
    without = OPTIONAL_PART.sub("", template)
    return (without,) if without == with_piece else (without, with_piece)


class _Schemas:
    """JSON schemas of structs; those with a name stand in `components`."""

    def __init__(self) -> None:
        self.components: dict[str, Json] = {}

    def of(self, wanted: object) -> Json:
        """The schema of a struct or a type of structs, with references to components."""
        schema: Json
        (schema,), components = msgspec.json.schema_components([wanted], ref_template=_REF)
        for component in components.values():
            component["description"] = inspect.cleandoc(component["description"])
        self.components |= components
        return schema


def _operation(operation: Operation, path: str, schemas: _Schemas) -> Json:
    slots = PATH_PARAMETER.findall(path)
    described: Json = {
        "operationId": operation.name + _suffix(operation, slots),
        "tags": [operation.tag.value],
        "summary": operation.summary,
        "description": operation.details,
        "parameters": [*map(_slot, slots), *map(_header, operation.headers)],
        "responses": _responses(operation, schemas),
    }
    if operation.bodies:
        described["requestBody"] = {
            "required": operation.needs_body,
            "content": {content.media_type: _content(content, schemas) for content in operation.bodies},
        }
    return described


def _suffix(operation: Operation, slots: list[str]) -> str:
    """What tells the second of two spellings from the first."""
    optional = PATH_PARAMETER.findall("".join(OPTIONAL_PART.findall(operation.path)))
    return "".join(f"By{name.capitalize()}" for name in optional if name in slots)


def _slot(name: str) -> Json:
    about, schema = _SLOTS[name]
    return {"name": name, "in": "path", "required": True, "description": about, "schema": schema}


def _header(header: Header) -> Json:
    about, schema = _HEADERS[header]
    return {"name": header.value, "in": "header", "required": False, "description": about, "schema": schema}


def _content(content: Content, schemas: _Schemas) -> Json:
    if content.media_type == MULTIPART:
        return {"schema": _FORM}
    for named in content.named:
        schemas.of(named)
    return {"schema": schemas.of(content.schema)} if content.schema is not None else {}


def _responses(operation: Operation, schemas: _Schemas) -> Json:
    done: Json = {"description": "Done."}
    if operation.answers:
        done["content"] = {content.media_type: _content(content, schemas) for content in operation.answers}
    if BINARY in {content.media_type for content in operation.answers}:
        done["headers"] = {
            Header.JSON_LENGTH.value: {"description": "Bytes of JSON before the tensors.", "schema": _WHOLE_NUMBER}
        }
    own = operation.refusals if operation.role is None else (*_COMMON_ERRORS, *_ACCESS_ERRORS, *operation.refusals)
    refusals = {str(status): {"$ref": f"#/components/responses/{_name(status)}"} for status in sorted(own)}
    return {"200": done, **refusals}


def _refusal(status: int, schemas: _Schemas) -> Json:
    """Triton says text/plain over some of its errors, which are JSON all the same."""
    error = {"schema": schemas.of(Error)}
    described: Json = {"description": _REFUSALS[status], "content": {JSON: error, TEXT: {}}}
    if status in _ANSWER_HEADERS:
        described["headers"] = _ANSWER_HEADERS[status]
    return described


def _name(status: int) -> str:
    return HTTPStatus(status).name.title().replace("_", "")


def _security(operation: Operation, open_to: frozenset[Role]) -> list[dict[str, list[str]]]:
    """Empty if no key is needed; has an empty alternative if a key is optional."""
    if operation.role is None:
        return []
    alternatives: list[dict[str, list[str]]] = [{name: []} for name in _SCHEMES]
    return [*alternatives, {}] if open_to & {operation.role, operation.or_role} else alternatives


_ENGINE_TIMEOUT_S = 2.0
_EXAMPLES = {"version": "1"}


class OpenApiEndpoint:
    """The endpoint. rows: all of the table of routes, this one too. open_to: what may be asked without a key."""

    def __init__(self, plane: DataPlane, rows: Sequence[RouteSpec], open_to: frozenset[Role] = frozenset(Role)) -> None:
        self._plane = plane
        self._rows = rows
        self._open_to = open_to

    async def __call__(self, request: Request) -> Response:
        """Asks the engine for its extensions; where it does not answer, all that rows serve is described."""
        operations = served(OPERATIONS, self._rows, await self._extensions(request))
        return json_response(document(operations, self._open_to))

    async def _extensions(self, request: Request) -> frozenset[str] | None:
        call = HttpCall("GET", b"/v2", (), b"")
        deadline = time.monotonic() + _ENGINE_TIMEOUT_S
        try:
            answer = await self._plane.relay(
                Verb.READ, InferHead(""), call, caller=caller_of(request), deadline=deadline
            )
            extensions = msgspec.json.decode(answer.body, type=ServerMetadata).extensions
            return frozenset(extensions) - self._plane.blocked_extensions
        except (EngineUnavailable, DeadlineExceeded, msgspec.DecodeError):
            return None


def served(
    operations: Iterable[Operation], rows: Iterable[RouteSpec], extensions: frozenset[str] | None
) -> tuple[Operation, ...]:
    """Those that a row serves and the engine can do. extensions: the engine's, None if unknown."""
    routes = [RawPathRoute(row) for row in rows]
    able = [op for op in operations if not op.extension or extensions is None or op.extension in extensions]
    found = ((operation, _route_of(operation, routes)) for operation in able)
    return tuple(
        replace(operation, summary=row.summary)
        for operation, row in found
        if row is not None and not isinstance(row.endpoint, NotServedEndpoint)
    )


def _route_of(operation: Operation, routes: Sequence[RawPathRoute]) -> RouteSpec | None:
    """The row that answers it: the first that matches, as the router has it."""
    path = PATH_PARAMETER.sub(lambda slot: _EXAMPLES.get(slot[1], "x"), expand_optional_parts(operation.path)[-1])
    scope = {"type": "http", "method": operation.method, "raw_path": path.encode()}
    return next((route.row for route in routes if route.matches(scope)[0] is Match.FULL), None)
