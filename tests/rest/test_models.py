"""What models and their repository are asked."""

import json

import pytest

from penstock.engines.model_health import Cause, KnownModel
from penstock.protocol.call import HttpAnswer
from tests.rest.harness import JSON, Front


@pytest.mark.parametrize(
    ("call", "text", "status"),
    [
        ("index", b"attempt to access JSON non-boolean as boolean", 400),
        ("index", b"failed to parse the request JSON buffer: Invalid value. at 1", 400),
        ("models/m/load", b"failed to load 'm', failed to poll from model repository", 400),
        ("models/m/unload", b"attempt to access JSON non-object as object", 400),
        ("models/m/load", b"the engine's own trouble", 500),
    ],
)
async def test_repository_call_that_the_engine_cannot_read_or_find_is_the_callers_mistake(
    front: Front, call: str, text: bytes, status: int
) -> None:
    """Triton answers 500; its text stays, the code becomes 400. Any other 500 stays one."""
    front.plane.answer = HttpAnswer(500, JSON, b'{"error":"' + text + b'"}')
    reply = await front.ask("POST", f"/v2/repository/{call}", b"{}")
    assert (reply.status, reply.body) == (status, front.plane.answer.body)


async def test_deadline_header_without_a_number_is_refused(front: Front) -> None:
    """An empty version is refused, too."""
    for value in (b"", b" ", b"soon"):
        reply = await front.ask("GET", "/v2", b"", ((b"x-request-timeout-ms", value),))
        assert reply.status == 400, value


INDEX = b'[{"name":"odd","version":"1","state":"READY"},{"name":"good","version":"1","state":"READY"},{"name":"never"}]'


async def test_refused_model_stands_in_the_index_as_unavailable_with_the_reason(front: Front) -> None:
    """The index lists a withheld model as unavailable, with the reason."""
    front.plane.answer = HttpAnswer(200, JSON, INDEX)
    front.plane.withheld = {"odd": KnownModel("odd", False, "slo_p99_ms is 'fast'", is_refused=True)}
    rows = json.loads((await front.ask("POST", "/v2/repository/index", b"")).body)
    assert rows == [
        {"name": "odd", "version": "1", "state": "UNAVAILABLE", "reason": "slo_p99_ms is 'fast'"},
        {"name": "good", "version": "1", "state": "READY"},
        {"name": "never"},
    ]
    ready = json.loads((await front.ask("POST", "/v2/repository/index", b'{"ready":true}')).body)
    assert [row["name"] for row in ready] == ["good", "never"]


async def test_index_is_the_engines_own_bytes_while_no_model_is_refused(front: Front) -> None:
    """Nothing is decoded for the usual case."""
    front.plane.answer = HttpAnswer(200, JSON, INDEX)
    assert (await front.ask("POST", "/v2/repository/index", b"")).body == INDEX


async def test_refused_model_is_not_ready_and_others_are(front: Front) -> None:
    """A withheld model is not ready."""
    front.plane.answer = HttpAnswer(200, (), b"")
    front.plane.withheld = {"odd": KnownModel("odd", False, "slo_p99_ms is 'fast'", is_refused=True)}
    refused = await front.ask("GET", "/v2/models/odd/ready")
    assert (refused.status, json.loads(refused.body)) == (400, {"error": "slo_p99_ms is 'fast'"})
    assert (await front.ask("GET", "/v2/models/good/ready")).status == 200


async def test_unavailable_model_is_not_ready_for_now(front: Front) -> None:
    """It gets 503 with the reason and Retry-After, because it may recover, unlike a refused model."""
    front.plane.answer = HttpAnswer(200, (), b"")
    known = KnownModel("stuck", False, "it answered nothing for 30 s", unavailable=Cause.HANG)
    front.plane.withheld = {"stuck": known}
    reply = await front.ask("GET", "/v2/models/stuck/versions/1/ready")
    assert (reply.status, reply.headers["retry-after"] in ("1", "2")) == (503, True)
    assert json.loads(reply.body) == {"error": "model 'stuck' is unavailable: it answered nothing for 30 s"}
    assert (await front.ask("GET", "/v2/models/good/ready")).status == 200
