"""Health."""

import json

from tests.rest.harness import Front


async def test_live_is_true_while_the_process_runs(front: Front) -> None:
    """Even when nothing else is well."""
    front.plane.unready_reason = "the engine is starting"
    front.plane.error = RuntimeError("broken")
    reply = await front.ask("GET", "/v2/health/live")
    assert (reply.status, reply.body) == (200, b'{"live":true}')
    assert reply.headers["content-type"] == "application/json"


async def test_ready_when_the_plane_is(front: Front) -> None:
    """200 with a body that KServe's client reads."""
    reply = await front.ask("GET", "/v2/health/ready")
    assert (reply.status, reply.body) == (200, b'{"ready":true}')


async def test_ready_when_the_plane_is_not_says_why(front: Front) -> None:
    """503 with the reason, and when to ask again."""
    front.plane.unready_reason = "the engine is starting"
    reply = await front.ask("GET", "/v2/health/ready")
    assert (reply.status, reply.headers["retry-after"] in ("1", "2")) == (503, True)
    assert json.loads(reply.body) == {
        "ready": False,
        "reason": "the engine is starting",
        "error": "not ready: the engine is starting",
    }
