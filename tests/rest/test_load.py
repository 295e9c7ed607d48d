"""The load test endpoints: who may call them, what they accept, and how a report is served."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.load.service import LoadOptions, LoadTests
from penstock.gateway.rest.load import REPORT_POLICY
from penstock.gateway.rest.routes import ForwardedIdentity
from penstock.protocol.identity import Role
from tests.auth.listeners import KEYS, door
from tests.gateway.test_load_tests import OWN, STAND_IN, until
from tests.rest.harness import JSON, Front

RUNS = "/v1/load/runs"


def front_at(home: Path, **options: Any) -> Front:
    """A gateway whose load tests are the stand-in's."""
    command = (sys.executable, str(STAND_IN))
    return Front(load=LoadTests(LoadOptions(home, OWN, command=command)), **options)


async def ask(front: Front, method: str, target: str, body: object = None, **headers: str) -> tuple[int, Any]:
    content = b"" if body is None else json.dumps(body).encode()
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    reply = await front.ask(method, target, content, [*JSON, *pairs])
    return reply.status, json.loads(reply.body)


async def run_to_its_end(front: Front, **headers: str) -> str:
    """A run's id, when it has ended."""
    status, run = await ask(front, "POST", RUNS, {"scenario": "steady"}, **headers)
    assert status == 201, run

    async def is_ended() -> bool:
        return (await ask(front, "GET", f"{RUNS}/{run['id']}", **headers))[1]["run"]["state"] != "running"

    await until(is_ended)
    return str(run["id"])


async def test_only_an_admin_may_start_or_see_load_tests(tmp_path: Path) -> None:
    """Every load test endpoint needs the role admin."""
    front = front_at(tmp_path, door=door(Role.READ, Role.INFER))
    for method, target in (
        *(("GET", "/v1/load/scenarios"), ("GET", RUNS), ("POST", RUNS), ("GET", f"{RUNS}/x"), ("DELETE", f"{RUNS}/x")),
        *(("GET", f"{RUNS}/x/{what}") for what in ("report", "result", "comparison")),
    ):
        for key in (Role.READ, Role.INFER):
            assert (await ask(front, method, target, {}, x_api_key=KEYS[key]))[0] == 403, (method, target)
        assert (await ask(front, method, target, {}))[0] in (401, 403)


async def test_run_is_sent_with_the_key_of_its_admin(tmp_path: Path) -> None:
    """The process gets the key of the request, whichever header it came in."""
    front = front_at(tmp_path, door=door())
    for headers in ({"x_api_key": KEYS[Role.ADMIN]}, {"authorization": f"Bearer {KEYS[Role.ADMIN]}"}):
        run_id = await run_to_its_end(front, **headers)
        environment = json.loads((tmp_path / "load-runs" / run_id / "seen.json").read_text())["environment"]
        assert environment["PENSTOCK_API_KEY"] == KEYS[Role.ADMIN]


async def test_core_takes_the_key_from_its_worker_and_a_client_cannot_send_one(tmp_path: Path) -> None:
    """In a core the worker's header counts; in a gateway without workers the same header means nothing."""
    core, alone = front_at(tmp_path / "a", gate=ForwardedIdentity()), front_at(tmp_path / "b")
    for front, home, key in ((core, tmp_path / "a", "pk-x"), (alone, tmp_path / "b", None)):
        run_id = await run_to_its_end(front, x_penstock_load_key="pk-x")
        environment = json.loads((home / "load-runs" / run_id / "seen.json").read_text())["environment"]
        assert environment.get("PENSTOCK_API_KEY") == key


async def test_report_may_run_nothing_and_load_nothing(tmp_path: Path) -> None:
    """The report's own policy: no script, no other host, in a sandbox."""
    front = front_at(tmp_path)
    reply = await front.ask("GET", f"{RUNS}/{await run_to_its_end(front)}/report")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/html")
    assert reply.headers["content-security-policy"] == REPORT_POLICY
    assert "script" not in REPORT_POLICY
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"scenario": "../x"}, "$.scenario"),
        ({"scenario": "steady", "duration_s": 1e9}, "$.duration_s"),
        ({"scenario": "steady", "rounds": 1000}, "$.rounds"),
        ({"scenario": "steady", "rate_per_s": -1}, "$.rate_per_s"),
        ({"scenario": "steady", "api_key": "a\nb"}, "$.api_key"),
        ({"scenario": "steady", "command": "rm"}, "unknown field"),
        ([], "Expected `object`"),
    ],
)
async def test_bad_requests_are_refused_in_a_sentence(tmp_path: Path, body: object, text: str) -> None:
    """Limits hold for each value, and unknown fields are refused."""
    status, answer = await ask(front_at(tmp_path), "POST", RUNS, body)
    assert status == 400
    assert text in answer["error"]


@pytest.mark.parametrize("query", ["?after=x", "?after=-1", "?after=99999999999999", "?other=1", "?"])
async def test_bad_positions_are_refused(tmp_path: Path, query: str) -> None:
    """`after` is a number of an earlier answer."""
    front = front_at(tmp_path)
    run_id = await run_to_its_end(front)
    status, _ = await ask(front, "GET", f"{RUNS}/{run_id}{query}")
    assert status == (200 if query == "?" else 400)


async def test_gateway_that_runs_no_load_tests_says_so() -> None:
    """501 where no load tests were composed."""
    assert (await ask(Front(load=None), "GET", RUNS))[0] == 501
