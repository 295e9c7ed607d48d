"""The line between the stack's parent and its gateway carries news in order, and ends when an end closes."""

import asyncio
import socket

from penstock.gateway.workers.gateway_process import (
    ControlConnection,
    ControlMessage,
    EngineStatusMessage,
    GatewayReady,
    GatewayServes,
    RestartEngine,
    RestartModel,
)


async def test_control_line_carries_every_kind_of_news_in_order() -> None:
    """What is sent is what is received, and reading ends with the other end."""
    left, right = socket.socketpair()
    sender, receiver = await ControlConnection.over(left), await ControlConnection.over(right)
    sent: list[ControlMessage] = [
        EngineStatusMessage(
            is_running=True, reason="", restarts=1, gateway_restarts=2, own_engines={"m": "/run/1", "n": ""}
        ),
        GatewayServes(1, 2, 3),
        GatewayReady("triton 2.51.0", ["a"], {"b": "broken\non purpose"}),
        RestartEngine("sick"),
        RestartModel("m", "it hangs", has_own_engine=True),
    ]
    for message in sent:
        sender.send(message)
    sender.close()
    async with asyncio.timeout(60):
        received = [message async for message in receiver.receive()]
    assert received == sent
    receiver.close()
    receiver.send(RestartEngine("not received"))
