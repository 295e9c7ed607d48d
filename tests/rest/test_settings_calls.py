"""Trace and log settings over REST: what is relayed, and what no client may set."""

import json

import pytest

from penstock.protocol.call import HttpAnswer, InferHead
from penstock.protocol.identity import Verb
from tests.rest.harness import JSON, Front

PLACES = [
    ("/v2/trace/setting", InferHead("")),
    ("/v2/models/ident/trace/setting", InferHead("ident")),
    ("/v2/logging", InferHead("")),
]


@pytest.mark.parametrize(("target", "head"), PLACES)
async def test_settings_are_read_and_changed_where_the_engine_has_them(
    front: Front, target: str, head: InferHead
) -> None:
    """A GET reads, a POST changes; body and answer pass untouched."""
    body = b' {"trace_rate": "5"} '
    for method, sent in (("GET", b""), ("POST", body)):
        assert (await front.ask(method, target, sent)).body == b'{"ok":true}'
    (read, *_), (change, _, call, _) = front.plane.relayed
    assert (read, change, call.body) == (Verb.READ, Verb.CONFIGURE, body)
    assert {asked[1] for asked in front.plane.relayed} == {head}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"trace_file":"/tmp/x"}', 501, "trace file location can not be updated through network protocol"),
        (b'{"trace\\u005ffile":null}', 501, "trace file location can not be updated through network protocol"),
        (b'{"log_file":""}', 501, "log file location can not be updated through network protocol"),
        (b'{"log_info":true,"log_info":false}', 400, "a name stands twice in one JSON object; give each member once"),
        (b"{", 400, "malformed JSON: Input data was truncated"),
        (b"[]", 400, "malformed JSON: Expected `object`, got `array`"),
    ],
)
@pytest.mark.parametrize("target", [place[0] for place in PLACES])
async def test_settings_that_no_client_may_set_are_refused_here(
    front: Front, target: str, body: bytes, status: int, said: str
) -> None:
    """A file in Triton's own words, however it is spelled: an older Triton would write it wherever a client says."""
    reply = await front.ask("POST", target, body)
    assert (reply.status, json.loads(reply.body)) == (status, {"error": said})
    assert front.plane.relayed == []


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (500, b'{"error":"attempt to access JSON non-boolean as boolean"}', 400),
        (503, b'{"error":"invalid argument for --log_format, got: x"}', 400),
        (400, b'{"error":"Unable to parse \'trace_rate\', got: x"}', 400),
        (503, b'{"error":"something else"}', 503),
    ],
)
async def test_settings_that_the_engine_cannot_read_are_the_clients_mistake(
    front: Front, status: int, text: bytes, expected: int
) -> None:
    """Triton answers 500, and 503 to a log format that it does not know."""
    front.plane.answer = HttpAnswer(status, JSON, text)
    reply = await front.ask("POST", "/v2/logging", b'{"log_info":1}')
    assert (reply.status, reply.body) == (expected, text)
