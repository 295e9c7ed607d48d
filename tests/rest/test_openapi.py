"""The description of the API."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import schemathesis
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from penstock.gateway.rest import image
from penstock.gateway.rest import schemas as images
from penstock.gateway.rest.models import NotServedEndpoint, not_served
from penstock.gateway.rest.openapi import document, expand_optional_parts, served
from penstock.gateway.rest.operations import OPERATIONS
from penstock.gateway.rest.routes import RawPathRoute, RouteSpec, role_needed
from penstock.protocol.call import HttpAnswer
from penstock.protocol.identity import Role
from tests.rest.harness import JSON, VALID_INFER, Front

GOLDEN = Path(__file__).parent.parent / "golden" / "rest"
CALLS = [(operation.method, path) for operation in OPERATIONS for path in expand_optional_parts(operation.path)]


async def described(front: Front) -> dict[str, Any]:
    """What the app says, over an engine that can do all that Triton can."""
    front.plane.answer = HttpAnswer(200, JSON, (GOLDEN / "triton_2_51_server_metadata.json").read_bytes())
    document: dict[str, Any] = json.loads((await front.ask("GET", "/openapi.json")).body)
    return document


def rows_of(front: Front) -> list[RouteSpec]:
    return [route.row for route in front.app.app.router.routes if isinstance(route, RawPathRoute)]  # type: ignore[attr-defined]


def leads_to(row: RouteSpec, method: str, path: str) -> bool:
    scope = {"type": "http", "method": method, "raw_path": re.sub(r"\{\w+\}", "1", path).encode()}
    return RawPathRoute(row).matches(scope)[0] is Match.FULL


async def answer(_: Request) -> Response:
    return Response()


async def test_description_is_a_valid_openapi_document(front: Front) -> None:
    """By OpenAPI 3.1's own schema; every schema in it is one, and every reference leads somewhere."""
    api = await described(front)
    schemathesis.openapi.from_dict(api).validate()
    for schema in api["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)
    for kind, name in re.findall(r'"#/components/(\w+)/(\w+)"', json.dumps(api)):
        assert name in api["components"][kind]
    names = [operation["operationId"] for path in api["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)


def test_whole_table_of_operations_is_a_valid_openapi_document() -> None:
    """Also what is off in a gateway as it starts by default."""
    schemathesis.openapi.from_dict(document(OPERATIONS, frozenset(Role))).validate()


async def test_description_has_every_row_that_is_served(front: Front) -> None:
    """A row without an operation, or one whose methods are not all described, would be a secret."""
    paths = (await described(front))["paths"]
    for row in rows_of(front):
        if isinstance(row.endpoint, NotServedEndpoint):
            continue
        for method in row.methods:
            assert any(leads_to(row, method, path) for path in paths if method.lower() in paths[path]), row.path


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_described_call_is_served_and_another_is_not(front: Front, method: str, path: str) -> None:
    """What the description holds does not answer 404, 405 or 501; what it leaves out does."""
    paths = (await described(front))["paths"]
    front.plane.answer = HttpAnswer(200, JSON, (GOLDEN / "triton_2_51_server_metadata.json").read_bytes())
    reply = await front.ask(method, re.sub(r"\{\w+\}", "1", path), VALID_INFER)
    is_described = method.lower() in paths.get(path, {})
    assert (reply.status not in (404, 405, 501)) == is_described, reply.body


async def test_described_roles_are_those_that_are_asked_for(front: Front) -> None:
    """What the description says about keys is what the gate wants."""
    for operation in OPERATIONS:
        for row in rows_of(front):
            if leads_to(row, operation.method, expand_optional_parts(operation.path)[0]) and not isinstance(
                row.endpoint, NotServedEndpoint
            ):
                assert role_needed(row, operation.method) == operation.role, operation.name
                assert row.or_role == operation.or_role, operation.name


def test_what_is_refused_or_beyond_the_engine_is_not_described() -> None:
    """A refused row is no service; an extension that the engine does not have is none either."""
    rows = [
        RouteSpec(("GET", "POST"), "/v2/logging", answer, "Log settings."),
        RouteSpec(("POST",), "/v2/models/{model}/infer", not_served("no"), "Off."),
        RouteSpec(("GET",), "/v2", answer, "Metadata."),
    ]
    paths = [
        [op.path for op in served(OPERATIONS, rows, known)] for known in (None, frozenset(["logging"]), frozenset())
    ]
    assert paths == [["/v2", "/v2/logging", "/v2/logging"], ["/v2", "/v2/logging", "/v2/logging"], ["/v2"]]


async def test_description_without_an_engine_tells_of_all_that_may_be_served(front: Front) -> None:
    """An engine that is down, or answers nonsense, is no reason to say nothing."""
    front.plane.answer = HttpAnswer(200, JSON, b"nonsense")
    reply = await front.ask("GET", "/openapi.json")
    assert reply.status == 200
    assert "/v2/models/{model}/infer" in json.loads(reply.body)["paths"]


def test_description_says_who_must_name_itself() -> None:
    """Health is everybody's; a role that is open has the empty alternative, another one has not."""
    paths: Any = document(OPERATIONS, frozenset({Role.INFER}))["paths"]
    assert paths["/v2/health/live"]["get"]["security"] == []
    assert {} in paths["/v2/models/{model}/infer"]["post"]["security"]
    assert {} in paths["/v2/models/{model}/ready"]["get"]["security"]
    assert paths["/v2"]["get"]["security"] == [{"ApiKey": []}, {"Bearer": []}]


def test_pictures_of_a_form_are_files_to_generators_of_clients() -> None:
    """Which send a text where the schema does not say that it is binary."""
    paths: Any = document(OPERATIONS, frozenset())["paths"]
    form = paths["/v2/models/{model}/image"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["properties"]["image"]["items"].items() >= {("type", "string"), ("format", "binary")}


async def test_described_bodies_are_those_of_the_wire(front: Front) -> None:
    """A valid request, Triton's answer and an image's answer, each by the schema that describes it."""
    components = (await described(front))["components"]

    def validate(name: str, body: bytes) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        jsonschema_rs.validate(schema, json.loads(body))

    validate("InferenceRequest", VALID_INFER)
    validate("ServerMetadata", (GOLDEN / "gateway_server_metadata.json").read_bytes())
    reply = await front.ask("POST", "/v2/models/ident/image", b"\xff\xd8\xff", ((b"x-request-id", b"7"),))
    validate("ImageAnswer", reply.body)
    with pytest.raises(jsonschema_rs.ValidationError):
        validate("InferenceRequest", VALID_INFER.replace(b"FP32", b"FP33"))


def test_described_answer_of_the_image_endpoint_has_its_members() -> None:
    """Two structs, one that is written and one that describes: the same members in the same order."""
    members = [
        [field.name for field in msgspec.structs.fields(kind)] for kind in (image.ImageResponseBody, images.ImageAnswer)
    ]
    assert members[0] == members[1]
