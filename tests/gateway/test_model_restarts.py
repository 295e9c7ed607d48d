"""When a model that hung gets its own process, and which restart messages the parent process gets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.engines.triton.client import TritonEngine
from penstock.gateway.composition import ConnectedEngine
from penstock.gateway.model_restarts import model_restarter, with_own_engines
from penstock.gateway.settings import Settings
from penstock.gateway.workers.gateway_process import ControlConnection, ControlMessage, RestartModel


@asynccontextmanager
async def control_messages(settings: Settings) -> AsyncIterator[list[ControlMessage]]:
    """The parent's messages after `m` failed and then hung twice."""
    left, right = socket.socketpair()
    ours, parent = await ControlConnection.over(left), await ControlConnection.over(right)
    backend = TritonEngine(http_url="http://127.0.0.1:9", grpc_address="127.0.0.1:9", max_connections=1)
    main = ConnectedEngine(backend, "nowhere")
    engine, own = with_own_engines(settings, main, ours)
    restart = model_restarter(settings, main, own, ours, lambda: {"m": 4})
    if restart is not None:
        for reason, hangs in (("it fails", 0), ("it hangs", 1), ("it hangs again", 2)):
            restart("m", reason, hangs)
    ours.close()
    async with asyncio.timeout(10):
        yield [message async for message in parent.receive()]
    parent.close()
    await engine.engine.aclose()


async def test_model_that_hung_gets_an_engine_of_its_own_and_one_that_fails_does_not() -> None:
    """It gets one at the first hang, permanently."""
    async with control_messages(Settings(engine="triton")) as message:
        assert message == [
            RestartModel("m", "it fails", 4),
            RestartModel("m", "it hangs", has_own_engine=True),
            RestartModel("m", "it hangs again", has_own_engine=True),
        ]


@pytest.mark.parametrize(
    "settings", [Settings(engine="triton", mps="on"), Settings(engine="triton", allow_client_shm=True)]
)
async def test_model_is_restarted_in_an_engine_that_more_depends_on(settings: Settings) -> None:
    """MPS limits its clients, and clients' shared memory is registered with one engine."""
    async with control_messages(settings) as message:
        assert message == [RestartModel("m", reason, 4) for reason in ("it fails", "it hangs", "it hangs again")]


async def test_model_in_an_engine_of_others_is_not_restarted() -> None:
    """Its operator restarts it."""
    async with control_messages(Settings(engine="http://127.0.0.1:9")) as message:
        assert message == []
