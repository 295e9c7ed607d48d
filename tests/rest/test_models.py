"""What models and their repository are asked."""

import pytest

from server.core.relay import HttpAnswer
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
    """An empty one too: whoever sends it has lost the number."""
    for value in (b"", b" ", b"soon"):
        reply = await front.ask("GET", "/v2", b"", ((b"x-request-timeout-ms", value),))
        assert reply.status == 400, value
