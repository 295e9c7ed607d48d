"""The system endpoints: who may read what, and what a query may say."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from penstock.gateway.rest.system import NO_AUDIT_LOG
from penstock.gateway.system.reports import SystemReports
from penstock.log_file import LogFile
from penstock.protocol.identity import Role
from tests.auth.listeners import KEYS, door
from tests.rest.harness import Front, described_by
from tests.support.system_sources import plain_sources

PATHS = ("/v1/system", "/v1/system/config", "/v1/system/findings", "/v1/logs", "/v1/audit")


def write(folder: Path, level: str, event: str, **fields: str) -> None:
    folder.mkdir(exist_ok=True)
    entry = {"level": level, "event": event, "timestamp": "2026-11-29T03:00:00.000000Z", **fields}
    LogFile(folder, "gateway")(None, "", entry)


def front_with(**changes: Any) -> Front:
    return Front(system=SystemReports(plain_sources(**changes)))


async def get(front: Front, target: str, key: Role | None = None) -> tuple[int, Any]:
    headers = [(b"x-api-key", KEYS[key].encode())] if key is not None else []
    reply = await front.ask("GET", target, b"", headers)
    return reply.status, json.loads(reply.body)


async def test_reader_sees_the_state_and_only_an_admin_the_rest() -> None:
    """Settings, findings, logs and the audit log need the role admin; the state needs the role read."""
    for role, allowed in ((Role.READ, {"/v1/system"}), (Role.INFER, set()), (Role.ADMIN, set(PATHS[1:]))):
        front = Front(door=door())
        statuses = {path: (await get(front, path, role))[0] for path in PATHS}
        assert statuses == {path: 200 if path in allowed else 403 for path in PATHS}
    assert {(await get(Front(door=door()), path))[0] for path in PATHS} == {401}


async def test_every_answer_has_its_described_form(front: Front) -> None:
    """By the schema in the API description."""
    document = described_by(front)
    for path in PATHS:
        content = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        status, body = await get(front, path)
        assert status == 200
        jsonschema_rs.validate(content["schema"] | {"components": document["components"]}, body)


async def test_state_names_unavailable_models_and_the_last_errors(tmp_path: Path) -> None:
    """Fields of an error may hold paths and addresses: they are for an admin only."""
    write(tmp_path / "logs", "info", "started")
    write(tmp_path / "logs", "error", "model cannot be loaded", path="/srv/models/x")
    sources = plain_sources(log_folder=tmp_path / "logs", readiness=lambda: "draining")
    front = Front(door=door(Role.READ, Role.ADMIN), system=SystemReports(sources))
    status, state = await get(front, "/v1/system")
    assert (status, state["is_ready"], state["reason"]) == (200, False, "draining")
    assert [(model["name"], model["state"]) for model in state["models"]] == [
        ("broken", "unavailable"),
        ("street", "ready"),
    ]
    (error,) = state["errors"]
    assert (error["event"], error["fields"]) == ("model cannot be loaded", {"path": "/srv/models/x"})
    reader = Front(door=door(Role.READ), system=SystemReports(sources))
    assert (await get(reader, "/v1/system"))[1]["errors"][0]["fields"] == {}


async def test_logs_are_filtered_and_followed(tmp_path: Path) -> None:
    """`next` of an answer is where the next one begins."""
    folder = tmp_path / "logs"
    for number in range(5):
        write(folder, "info" if number % 2 else "warning", f"line {number}")
    front = front_with(log_folder=folder)

    async def events(query: str) -> tuple[list[str], str]:
        status, page = await get(front, f"/v1/logs?{query}")
        assert status == 200, page
        return [line["event"] for line in page["lines"]], page["next"]

    newest, at = await events("limit=2")
    assert newest == ["line 3", "line 4"]
    assert (await events("level=warning&text=LINE&limit=10"))[0] == ["line 0", "line 2", "line 4"]
    assert (await events("since=2026-11-29T03:00:00.5Z"))[0] == []
    assert (await events("since=1d&text=3"))[0] in ([], ["line 3"])  # by the clock of the machine
    write(folder, "error", "later")
    assert (await events(f"after={at}"))[0] == ["later"]
    assert (await events("after=0-0&limit=3"))[0] == ["line 0", "line 1", "line 2"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("level=loud", "level is 'loud'; it must be one of debug, info"),
        ("since=yesterday", "since is 'yesterday'; it must be a duration such as 30s"),
        ("since=9999999d", "since is"),
        ("since=0001-01-01T00:00:00%2B14:00", "since is"),
        ("after=1", "after: '1' is not a position in the log"),
        ("limit=0", "limit is '0'; it must be a number from 1 to 1000"),
        ("limit=%D9%A1", "limit is"),
        ("limit=100000000000000000000", "limit is"),
        ("text=" + "x" * 201, "text has 201 characters (limit 200)"),
        ("lines=5", "unknown query parameter 'lines'"),
        ("limit=5&limit=6", "given twice"),
    ],
)
async def test_malformed_query_of_the_logs_is_refused_with_what_it_may_be(front: Front, query: str, words: str) -> None:
    """One sentence that names the parameter."""
    status, body = await get(front, f"/v1/logs?{query}")
    assert status == 400
    assert words in body["error"]


async def test_audit_log_that_is_not_written_is_404_with_the_flag() -> None:
    """The answer says how to have one."""
    assert await get(front_with(audit_log=None), "/v1/audit") == (404, {"error": NO_AUDIT_LOG})


async def test_gateway_without_a_log_folder_says_where_its_log_is() -> None:
    """501, not an empty log."""
    status, body = await get(front_with(log_folder=None), "/v1/logs")
    assert status == 501
    assert "standard error" in body["error"]
