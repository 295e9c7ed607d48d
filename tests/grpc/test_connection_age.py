"""Connections that are too old end with their calls, so that clients find replicas that came later."""

import asyncio

from penstock.gateway.grpc.server import GrpcLimits
from tests.grpc.harness import Front, infer_message, serving
from tests.grpc.scripted import ScriptedStream, streaming

AGE_S = 0.25
AGES = 6


async def _ask_for(front: Front, seconds: float) -> None:
    """Calls without a pause. Raises what a call raises."""
    async with asyncio.timeout(seconds + 10):
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await front.call("ModelInfer", infer_message())


def _connections(front: Front) -> set[str]:
    return {caller.connection for caller in front.plane.callers}


async def test_old_connections_are_replaced_and_no_call_fails() -> None:
    """Eight callers on one channel never pause over six ages: each call is answered once, over several connections."""
    async with serving(GrpcLimits(max_connection_age_s=AGE_S)) as front:
        await asyncio.gather(*(_ask_for(front, AGES * AGE_S) for _ in range(8)))
        assert AGES / 2 <= len(_connections(front)) <= 2 * AGES
        assert len(front.plane.relayed) == len(front.plane.callers)


async def test_connections_grow_old_where_nothing_was_said() -> None:
    """Without the limit a client keeps its one connection."""
    async with serving() as front:
        await _ask_for(front, 2 * AGE_S)
        assert len(_connections(front)) == 1


async def test_stream_outlives_the_age_of_its_connection() -> None:
    """It is served in both directions for many ages, while calls beside it go to connections of their own.

    A slow call is one such stream to gRPC.
    """
    async with serving(GrpcLimits(max_connection_age_s=AGE_S)) as front:
        engine = ScriptedStream()
        front.plane.scripts.append(engine)
        async with streaming(front) as client:
            for number in range(1, 2 * AGES):
                await client.ask("double", str(number))
                await engine.has(number)
                said = engine.say(str(number))
                assert await client.hear_bytes() == said
                await _ask_for(front, AGE_S / 2)
        assert len(_connections(front)) > 2
