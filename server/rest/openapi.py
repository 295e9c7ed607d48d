"""Operations as an OpenAPI document."""

import inspect
from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from server import VERSION
from server.core.caller import Role
from server.rest.operations import BINARY, JSON, MULTIPART, TEXT, Content, Header, Operation
from server.rest.routes import OPTIONAL, SLOT
from server.rest.schemas.models import Error

Json = dict[str, object]

_VERSION = "3.1.0"
_REF = "#/components/schemas/{name}"
_REFUSALS = {
    400: "Malformed, or not what the model takes.",
    401: "No API key or token, or one that nobody knows.",
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
_ABOUT = (
    "KServe v2 (Open Inference Protocol) with Triton's extensions, and images as they are encoded. Paths are taken as "
    'they stand on the wire: neither decoded nor merged nor redirected. Every error is {"error": "..."}; what the '
    "engine answers is relayed as it is. The same is served over gRPC, on a port of its own."
)
_EVERYWHERE = (400, 404, 500, 501, 503, 504)
_OF_ACCESS = (401, 403, 429)
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
        for path in spellings(operation.path):
            described = _operation(operation, path, schemas)
            described["security"] = _security(operation, open_to)
            paths.setdefault(path, {})[operation.method.lower()] = described
    refusals = {_name(status): _refusal(status, schemas) for status in _REFUSALS}
    return {
        "openapi": _VERSION,
        "info": {"title": "Penstock", "version": VERSION, "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": schemas.components, "responses": refusals, "securitySchemes": _SCHEMES},
    }


def spellings(template: str) -> tuple[str, ...]:
    """The paths that a template stands for: without its optional piece and, where it has one, with it."""
    with_piece = OPTIONAL.sub(r"\1", template)
    without = OPTIONAL.sub("", template)
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
    slots = SLOT.findall(path)
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
    optional = SLOT.findall("".join(OPTIONAL.findall(operation.path)))
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
    own = operation.refusals if operation.role is None else (*_EVERYWHERE, *_OF_ACCESS, *operation.refusals)
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
    """Empty where nobody need say who it is; an empty alternative where one may."""
    if operation.role is None:
        return []
    alternatives: list[dict[str, list[str]]] = [{name: []} for name in _SCHEMES]
    return [*alternatives, {}] if open_to & {operation.role, operation.or_role} else alternatives
