"""The system endpoints of a real stack with Triton."""

import json
import urllib.parse
from typing import Any

import pytest

from tests.support.http import call
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")


def get(stack: RunningStack, path: str, **query: object) -> Any:
    answer = call("GET", f"{stack.http_url}{path}?{urllib.parse.urlencode(query)}")
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def test_system_of_a_stack_with_triton(stack: RunningStack) -> None:
    """Engine, models, and every process with its role; the log has the lines of parent, gateway and Triton."""
    state = get(stack, "/v1/system")
    assert state["engine"]["name"].startswith("triton 2.")
    assert {"name": "street", "state": "ready", "reason": ""} in state["models"]
    roles = [process["role"] for process in state["processes"]]
    assert roles[0] == "up"
    assert {"gateway", "tritonserver", "decoder"} <= set(roles)
    assert "street_0_0" in roles, "a process of Triton's Python backend is named by its model instance"
    assert all(process["rss_bytes"] > 1 << 20 for process in state["processes"])
    assert {line["process"] for line in get(stack, "/v1/logs", limit=1000)["lines"]} == {"up", "gateway"}
    assert get(stack, "/v1/logs", text="triton: ", limit=5)["lines"], "Triton's own lines"


def test_settings_and_findings_of_a_stack(stack: RunningStack) -> None:
    """Flags and variables that the stack was started with are named; doctor examines the machine for it."""
    rows = {row["name"]: row for row in get(stack, "/v1/system/config")["settings"]}
    assert (rows["http_port"]["origin"], rows["http_port"]["source"]) == ("flag", "--http-port")
    assert f":{rows['http_port']['value']}" in stack.http_url
    assert (rows["decoders"]["value"], rows["decoders"]["source"]) == (1, "PENSTOCK_DECODERS")
    assert rows["grace_s"]["origin"] == "default"
    found = {row["id"]: row for row in get(stack, "/v1/system/findings")["findings"]}
    assert {"host.system", "cpu.cores", "memory.size", "engine.choice"} <= found.keys()
    assert found["ports.ours"]["status"] == "ok", "its own ports are no fault"
