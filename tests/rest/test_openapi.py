"""The description of the API."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from fastapi.routing import APIRoute

from penstock.protocol.call import HttpAnswer
from penstock.protocol.identity import Role
from tests.auth.listeners import door
from tests.rest.harness import JSON, VALID_INFER, Front, described_by

GOLDEN = Path(__file__).parent.parent / "golden" / "rest"
WHOLE = described_by(Front())
CALLS = [(method.upper(), path) for path, operations in WHOLE["paths"].items() for method in operations]


async def described(front: Front) -> dict[str, Any]:
    """What the app says, over an engine that can do all that Triton can."""
    front.plane.answer = HttpAnswer(200, JSON, (GOLDEN / "triton_2_51_server_metadata.json").read_bytes())
    document: dict[str, Any] = json.loads((await front.ask("GET", "/openapi.json")).body)
    return document


@pytest.fixture(scope="module")
def api() -> dict[str, Any]:
    return asyncio.run(described(Front()))


def test_description_is_a_valid_openapi_document(api: dict[str, Any]) -> None:
    """By OpenAPI 3.1's own schema; every schema in it is one, and every reference leads somewhere."""
    schemathesis.openapi.from_dict(api).validate()
    for schema in api["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)
    for kind, name in re.findall(r'"#/components/(\w+)/(\w+)"', json.dumps(api)):
        assert name in api["components"][kind]
    names = [operation["operationId"] for path in api["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)


def test_description_of_all_that_can_be_served_is_a_valid_openapi_document() -> None:
    """Also what is off in a gateway as it starts by default."""
    schemathesis.openapi.from_dict(WHOLE).validate()


def test_description_has_every_route(front: Front) -> None:
    """Except the pages for people, and paths that Triton or the gateway always refuses."""
    hidden = {f"/v2/{kind}sharedmemory/register" for kind in ("system", "cuda")} | {"/docs", "/"}
    hidden |= {f"/v2/repository/{{repository}}/models/{{model}}/{action}" for action in ("load", "unload")}
    routes = (route for route in front.fastapi.routes if isinstance(route, APIRoute))
    served = {(method, route.path_format) for route in routes for method in route.methods}
    assert {path for _, path in served - set(CALLS)} == hidden


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_described_call_is_served_and_another_is_not(
    front: Front, api: dict[str, Any], method: str, path: str
) -> None:
    """What the description holds does not answer 404, but for an unknown model, 405 or 501; what it leaves out does.

    Here no load tests are installed, which their endpoints say.
    """
    front.plane.answer = HttpAnswer(200, JSON, (GOLDEN / "triton_2_51_server_metadata.json").read_bytes())
    reply = await front.ask(method, re.sub(r"\{\w+\}", "1", path), VALID_INFER)
    is_described = method.lower() in api["paths"].get(path, {})
    is_served = reply.status not in (404, 405, 501) or reply.headers.get("x-penstock-reason") == "model_not_found"
    is_served |= b"runs no load tests" in reply.body
    assert is_served == is_described, reply.body


@pytest.mark.parametrize(
    ("extensions", "blocked", "paths"),
    [
        (None, frozenset(), ["/v2/logging", "/v2/systemsharedmemory/status"]),
        (None, frozenset(["system_shared_memory"]), ["/v2/logging"]),
        (frozenset(["logging"]), frozenset(), ["/v2/logging"]),
        (frozenset(), frozenset(), []),
    ],
)
def test_what_is_refused_or_beyond_the_engine_is_not_described(
    front: Front, extensions: frozenset[str] | None, blocked: frozenset[str], paths: list[str]
) -> None:
    """An extension that is blocked here is not described, nor one that the engine does not have."""
    described = described_by(front, extensions, blocked)["paths"]
    assert [path for path in ("/v2/logging", "/v2/systemsharedmemory/status") if path in described] == paths
    assert "/v2/models/{model}/infer" in described


async def test_description_without_an_engine_tells_of_all_that_may_be_served(front: Front) -> None:
    """An engine that is down, or answers nonsense, is no reason to say nothing."""
    front.plane.answer = HttpAnswer(200, JSON, b"nonsense")
    reply = await front.ask("GET", "/openapi.json")
    assert reply.status == 200
    assert "/v2/models/{model}/infer" in json.loads(reply.body)["paths"]


def test_description_says_who_must_name_itself(front: Front) -> None:
    """Health needs no key. Each role that suffices is named; if one is open, a key is optional."""
    paths = described_by(front, open_to=frozenset({Role.INFER}))["paths"]
    assert paths["/v2/health/live"]["get"]["security"] == []
    assert {} in paths["/v2/models/{model}/infer"]["post"]["security"]
    ready = paths["/v2/models/{model}/ready"]["get"]["security"]
    assert ready == [{key: [role]} for key in ("ApiKey", "Bearer") for role in ("read", "infer")] + [{}]
    assert paths["/v2"]["get"]["security"] == [{"ApiKey": ["read"]}, {"Bearer": ["read"]}]


def test_pictures_of_a_form_are_files_to_generators_of_clients() -> None:
    """Which send a text where the schema does not say that it is binary."""
    body = WHOLE["paths"]["/v2/models/{model}/image"]["post"]["requestBody"]["content"]
    items = body["multipart/form-data"]["schema"]["properties"]["image"]["items"]
    assert items.items() >= {("type", "string"), ("format", "binary")}


async def test_described_bodies_are_those_of_the_wire(front: Front, api: dict[str, Any]) -> None:
    """A valid request, Triton's answer and an image's answer, each by the schema that describes it."""
    components = api["components"]

    def validate(name: str, body: bytes) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        jsonschema_rs.validate(schema, json.loads(body))

    validate("InferenceRequest", VALID_INFER)
    validate("ServerMetadata", (GOLDEN / "gateway_server_metadata.json").read_bytes())
    reply = await front.ask("POST", "/v2/models/ident/image", b"\xff\xd8\xff", ((b"x-request-id", b"7"),))
    validate("ImageAnswer", reply.body)
    with pytest.raises(jsonschema_rs.ValidationError):
        validate("InferenceRequest", VALID_INFER.replace(b"FP32", b"FP33"))


async def test_page_of_the_description_needs_no_other_host_and_no_key() -> None:
    """Its policy allows its own script and style, and calls to its own origin; it names no other host."""
    reply = await Front(door=door()).ask("GET", "/docs")
    policy = reply.headers["content-security-policy"]
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert re.fullmatch(
        r"default-src 'none'; connect-src 'self'; script-src 'sha256-[^']+'; style-src 'sha256-[^']+'; .*", policy
    )
    assert not re.search(rb"(?:https?:)?//\w", reply.body.replace(b"/** ", b""))
    assert reply.body.count(b"<script") == reply.body.count(b"<style") == 1
