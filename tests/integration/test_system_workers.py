"""The system endpoints of a real stack with workers and a core."""

import pytest

from tests.integration.test_system import get
from tests.support.http import call
from tests.support.stack import CHECKOUT, RunningStack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("stack")


def test_system_of_a_stack_with_workers(fronts: RunningStack) -> None:
    """Workers forward the question to the core, and the log has their lines, too."""
    for _ in range(4):  # connections go to both workers
        state = get(fronts, "/v1/system")
        assert state["workers"] == 2
        assert {"up", "gateway", "worker 1", "worker 2"} <= {process["role"] for process in state["processes"]}
    lines = get(fronts, "/v1/logs", text="listening", limit=100)["lines"]
    assert {"worker 1", "worker 2"} <= {line["process"] for line in lines}


def test_models_of_a_stack_with_workers_have_the_traffic_of_all(fronts: RunningStack) -> None:
    """Whichever worker answered the inferences, and whichever is asked."""
    picture = (CHECKOUT / "model_repository" / "street" / "golden.jpg").read_bytes()
    before = get(fronts, "/v1/models/brightness")
    for _ in range(6):
        answer = call("POST", f"{fronts.http_url}/v2/models/brightness/image", picture, {"content-type": "image/jpeg"})
        assert answer.status == 200, answer.body
    answered = before["traffic"]["requests"] + 6
    wait_for(
        lambda: get(fronts, "/v1/models/brightness")["traffic"]["requests"] == answered,
        10,
        "figures are read at most once a second",
    )
    row = get(fronts, "/v1/models/brightness", over_s=60)
    assert (row["state"], row["versions"][0]["state"]) == ("ready", "READY")
    assert row["traffic"]["codes"]["200"] >= 6
    assert row["traffic"]["p50_ms"] > 0
    assert "brightness" in {each["name"] for each in get(fronts, "/v1/models")["models"]}
