"""What the front says of itself, and how it ends."""

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2

from penstock.testing import FakeMode
from tests.grpc.harness import Front, infer_message, serving

Code = grpc.StatusCode
HEALTH = "/grpc.health.v1.Health/"


async def test_health_check_follows_readiness(front: Front) -> None:
    """For the server and for the inference service; an unknown service is not found."""
    check = front.channel.unary_unary(
        HEALTH + "Check", health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
    )
    for service in ("", "inference.GRPCInferenceService"):
        assert (await check(health_pb2.HealthCheckRequest(service=service))).status == 1
    front.plane.unready_reason = "draining"
    assert (await check(health_pb2.HealthCheckRequest())).status == 2
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await check(health_pb2.HealthCheckRequest(service="other"))
    assert refused.value.code() is Code.NOT_FOUND


async def test_health_watch_tells_changes_and_ends_with_the_server() -> None:
    """Serving, not serving, serving; and a drain does not wait for watchers."""
    async with serving() as front:
        watch = front.channel.unary_stream(
            HEALTH + "Watch", health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString
        )(health_pb2.HealthCheckRequest())
        seen = [(await watch.read()).status]
        front.plane.unready_reason = "down"
        seen.append((await watch.read()).status)
        front.plane.unready_reason = ""
        seen.append((await watch.read()).status)
        started = time.monotonic()
        assert await front.server.stop(10)
        seen.append((await watch.read()).status)

        assert seen == [1, 2, 1, 2]
        assert await watch.read() is grpc.aio.EOF
        assert time.monotonic() - started < 8


async def test_stop_lets_running_calls_end() -> None:
    """Accepted requests are answered; new ones are not taken."""
    async with serving() as front:
        front.engine.mode = FakeMode.SLOW
        running = asyncio.create_task(front.call("ModelInfer", infer_message()))
        await front.plane.entered.wait()
        stopping = asyncio.create_task(front.server.stop(5))
        front.engine.release.set()

        assert await running
        assert await stopping is True


async def test_stop_cuts_what_outlasts_the_grace(capfd: pytest.CaptureFixture[str]) -> None:
    """UNAVAILABLE with a sentence, the engine's work cancelled, within the grace and a little, and no traceback."""
    async with serving() as front:
        front.engine.mode = FakeMode.SLOW
        running = asyncio.create_task(front.call("ModelInfer", infer_message()))
        await front.plane.entered.wait()
        started = time.monotonic()

        assert await front.server.stop(0.2) is False

        assert time.monotonic() - started < 5  # the engine would never answer
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running
        assert refused.value.code() is Code.UNAVAILABLE
        assert refused.value.details() == "this gateway stopped before the answer came; send to another one"
        assert front.engine.cancelled == 1
    assert "Traceback" not in capfd.readouterr().err
