"""POST /v1/models/{model}/check: the process that checks a model, with the client's key."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from penstock.gateway.model_check import ModelChecker
from penstock.gateway.model_command import ModelProcessOptions
from penstock.gateway.model_uploads import ModelUploads
from penstock.gateway.rest.load import KEY_HEADER
from penstock.gateway.rest.routes import ForwardedIdentity
from penstock.protocol.identity import Role
from tests.auth.listeners import KEYS, door
from tests.rest.harness import Front, described_by
from tests.support.add_stub import STUB

URL = "http://127.0.0.1:8000"
CHECK = "/v1/models/{}/check"


def checking_front(home: Path, **given: Any) -> Front:
    """Checks models with the stand-in for the command."""
    uploads = ModelUploads(home, ())
    return Front(checker=ModelChecker(uploads, URL, ModelProcessOptions(command=STUB)), **given)


async def check(front: Front, model: str, *headers: tuple[bytes, bytes]) -> tuple[int, Any]:
    reply = await front.ask("POST", CHECK.format(model), b"", list(headers))
    return reply.status, json.loads(reply.body)


async def test_check_answers_the_commands_result(tmp_path: Path) -> None:
    """In the described form; the process called this gateway, and nothing is left of it."""
    front = checking_front(tmp_path)
    status, body = await check(front, "street")
    assert (status, body["verdict"], body["reasons"]) == (200, "differs", ["output 'x' is wrong"])
    assert body["notes"] == [URL, ""]
    document = described_by(front)
    content = document["paths"]["/v1/models/{model}/check"]["post"]["responses"]["200"]["content"]["application/json"]
    jsonschema_rs.validate(content["schema"] | {"components": document["components"]}, body)
    assert list((tmp_path / "staging").iterdir()) == []


async def test_only_an_admin_checks_and_the_process_has_that_key(tmp_path: Path) -> None:
    """By its environment; other roles are refused before anything starts."""
    for role in (Role.READ, Role.INFER):
        front = checking_front(tmp_path, door=door())
        assert (await check(front, "street", (b"x-api-key", KEYS[role].encode())))[0] == 403
    key = KEYS[Role.ADMIN]
    _, body = await check(checking_front(tmp_path, door=door()), "street", (b"x-api-key", key.encode()))
    assert body["notes"] == [URL, key]


async def test_core_takes_the_key_from_its_worker_only(tmp_path: Path) -> None:
    """A client of a gateway without workers cannot name another key."""
    sent = (KEY_HEADER, b"pk-sent")
    assert (await check(checking_front(tmp_path), "street", sent))[1]["notes"][1] == ""
    core = checking_front(tmp_path, gate=ForwardedIdentity())
    assert (await check(core, "street", sent))[1]["notes"][1] == "pk-sent"


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [
        ("none", 404, "GET /v1/models lists them"),
        ("--record", 404, "there is no model '--record'"),
        ("broken", 400, "the model was not checked: no model was checked, since a check wants a key with the roles"),
    ],
)
async def test_model_that_cannot_be_checked_has_a_sentence(tmp_path: Path, model: str, status: int, text: str) -> None:
    """An unknown one, a flag in place of a name, and what the command itself says."""
    found, body = await check(checking_front(tmp_path), model)
    assert (found, text in body["error"]) == (status, True), body


async def test_one_model_is_checked_at_a_time(tmp_path: Path) -> None:
    """The second gets 409; after the first there is a check again."""
    front = checking_front(tmp_path)
    both = await asyncio.gather(check(front, "street"), check(front, "street"))
    assert sorted(status for status, _ in both) == [200, 409]
    assert (await check(front, "street"))[0] == 200
