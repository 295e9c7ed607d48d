"""A load test that a client starts at a stack with workers: progress, stop, report."""

import json
import time
from typing import Any

import pytest

from tests.support.http import call
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")
RUNS = "/v1/load/runs"
JSON = {"content-type": "application/json"}


def ask(stack: RunningStack, method: str, path: str, body: object = None) -> Any:
    answer = call(method, f"{stack.http_url}{path}", b"" if body is None else json.dumps(body).encode(), JSON)
    assert answer.status in (200, 201), answer.body
    return json.loads(answer.body)


def test_load_test_of_a_stack_with_workers(fronts: RunningStack) -> None:
    """A worker forwards to the core, which runs the test; a stop leaves a report."""
    names = {row["name"] for row in ask(fronts, "GET", "/v1/load/scenarios")["scenarios"]}
    assert {"image-steady", "tensor-small", "overload"} <= names
    assert "video-streams" not in names
    run = ask(fronts, "POST", RUNS, {"scenario": "tensor-small", "model": "plain"})
    until, progress, after = time.monotonic() + 60, [], 0
    while not any(line["p99_ms"] for line in progress):
        assert time.monotonic() < until, progress
        time.sleep(0.2)
        found = ask(fronts, "GET", f"{RUNS}/{run['id']}?after={after}")
        assert found["run"]["state"] == "running", found
        progress, after = progress + found["progress"], found["next"]
    stopped = ask(fronts, "DELETE", f"{RUNS}/{run['id']}")
    assert (stopped["state"], stopped["figures"]["models"]) == ("stopped", ["plain"])
    report = call("GET", f"{fronts.http_url}{RUNS}/{run['id']}/report")
    assert b"the run was stopped before its end" in report.body
    assert "sandbox" in report.headers["content-security-policy"]
