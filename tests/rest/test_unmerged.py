"""The config of a model whose rows are not merged says so."""

import msgspec
import pytest

from penstock.protocol.call import HttpAnswer
from penstock.protocol.engine import UNMERGED
from tests.rest.harness import Front

WHY = "output 'y' has a row for each object"
CONFIG = b'{"name": "a b", "max_batch_size": 8}'


@pytest.mark.parametrize(
    ("name", "config", "parameters"),
    [
        ("other", CONFIG, None),
        ("a b", CONFIG, {UNMERGED: {"string_value": WHY}}),
        (
            "a b",
            b'{"name": "a b", "max_batch_size": 8, "parameters": {"topk": {"string_value": "1"}}}',
            {"topk": {"string_value": "1"}, UNMERGED: {"string_value": WHY}},
        ),
    ],
)
async def test_config_says_why_rows_are_not_merged(
    front: Front, name: str, config: bytes, parameters: dict[str, object] | None
) -> None:
    """It has a parameter with the reason; all else is the engine's. Other models do not have the parameter."""
    front.plane.unmerged, front.plane.answer = {name: WHY} if parameters else {}, HttpAnswer(200, (), config)
    reply = await front.ask("GET", f"/v2/models/{name.replace(' ', '%20')}/config")
    answered = msgspec.json.decode(reply.body)
    assert answered.pop("parameters", None) == parameters
    assert answered == {"name": "a b", "max_batch_size": 8}


async def test_refused_config_is_relayed_as_it_is(front: Front) -> None:
    """A refused request has no config to change."""
    front.plane.unmerged, front.plane.answer = {"m": WHY}, HttpAnswer(400, (), b'{"error":"unknown"}')
    reply = await front.ask("GET", "/v2/models/m/config")
    assert (reply.status, reply.body) == (400, b'{"error":"unknown"}')
