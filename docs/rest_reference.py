"""The REST API of the gateway and of the video program as tables, from the OpenAPI documents of both programs."""

from collections.abc import Iterable, Mapping
from typing import Any, cast
from unittest.mock import Mock

from fastapi import FastAPI

from penstock.gateway.rest.app import create_app as create_gateway
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.openapi import describe
from penstock_video.api.app import create_app as create_video
from penstock_video.api.options import ApiOptions

Json = Mapping[str, Any]
_ANY_ROLE = "none"
_OPEN = ("/health/live", "/health/ready")  # of the video program: every other GET needs `read`, a change `admin`


def gateway_api() -> str:
    """Every operation of port 8000 that an engine can serve."""
    return _operations(documents()[0], is_video=False)


def video_api() -> str:
    """Every operation of port 8010."""
    return _operations(documents()[1], is_video=True)


def documents() -> tuple[Json, Json]:
    """The OpenAPI documents of ports 8000 and 8010."""
    gateway = _application(
        create_gateway(Mock(tracer=None), RestOptions(), Mock())
    )  # for its routes: nothing is called
    video = _application(create_video(Mock(), Mock(), Mock(), ApiOptions(), "text/plain").app)
    return describe(gateway, None, frozenset(), frozenset()), video.openapi()


def _application(app: Any) -> FastAPI:
    """The FastAPI application inside its middleware."""
    while not isinstance(app, FastAPI):
        app = getattr(app, "_app", None) or app.app
    return app


def _operations(document: Json, *, is_video: bool) -> str:
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            role = _video_role(path, method) if is_video else _role(operation)
            text = _operation(f"{method.upper()} {path}", role, operation, document)
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append(text)
    return "\n".join(f"### {tag[0].upper()}{tag[1:]}\n\n" + "\n".join(texts) for tag, texts in by_tag.items())


def _operation(head: str, role: str, operation: Json, document: Json) -> str:
    text = " ".join(filter(None, (operation.get("summary"), " ".join(operation.get("description", "").split()))))
    lines = [f"#### `{head}`", "", text, "", f"Role: {role}. {_answers(operation)}", ""]
    bodies = operation.get("requestBody", {}).get("content", {})
    if bodies:
        lines += [f"Body: {', '.join(_content(bodies, document))}.", ""]
    if operation.get("parameters"):
        lines += ["| parameter | in | values | meaning |", "|---|---|---|---|"]
        lines += [_parameter(each) for each in operation["parameters"]] + [""]
    return "\n".join(lines)


def _parameter(parameter: Json) -> str:
    schema = next((one for one in parameter["schema"].get("anyOf", ()) if one.get("type") != "null"), None)
    schema = schema or parameter["schema"]
    meaning = parameter.get("description") or schema.get("description", "")
    cells = (f"`{parameter['name']}`", parameter["in"], _values({**schema, **_default(parameter)}), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(parameter: Json) -> Json:
    schema = parameter["schema"]
    return {"default": schema["default"]} if schema.get("default") is not None else {}


def _values(schema: Json) -> str:
    if "enum" in schema:
        text = ", ".join(f"`{value}`" for value in schema["enum"])
    else:
        text = str(schema.get("type", "any"))
        low, high = schema.get("minimum"), schema.get("maximum")
        if low is not None or high is not None:
            text += f", {low if low is not None else '…'} to {high if high is not None else '…'}"
    return text + (f"; default `{schema['default']}`" if "default" in schema else "")


def _answers(operation: Json) -> str:
    good = [status for status in operation["responses"] if status.startswith("2")]
    others = [status for status in operation["responses"] if not status.startswith("2")]
    types = ", ".join(dict.fromkeys(_content_types(operation["responses"][status] for status in good)))
    text = f"Answers: {', '.join(good)}" + (f" ({types})" if types else "")
    return f"{text}; errors: {', '.join(sorted(others))}." if others else f"{text}."


def _content_types(responses: Iterable[Json]) -> list[str]:
    return [f"`{kind}`" for response in responses for kind in response.get("content", {})]


def _content(bodies: Json, document: Json) -> list[str]:
    """Each content type, with the fields of its JSON object."""
    found = []
    for kind, body in bodies.items():
        schema = body.get("schema", {})
        name = schema.get("$ref", "").rpartition("/")[2]
        fields = document["components"]["schemas"].get(name, schema).get("properties", {})
        names = ", ".join(f"`{field}`" for field in fields)
        found.append(f"`{kind}`" + (f" with {names}" if names else ""))
    return found


def _role(operation: Json) -> str:
    roles = dict.fromkeys(role for way in operation.get("security", ()) for names in way.values() for role in names)
    return " or ".join(f"`{cast(str, role)}`" for role in roles) or _ANY_ROLE


def _video_role(path: str, method: str) -> str:
    if path in _OPEN:
        return _ANY_ROLE
    return "`read`" if method == "get" else "`admin`"
