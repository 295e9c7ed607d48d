"""The line between the stack's parent and its gateway carries news in order, and ends when an end closes."""

import asyncio
import socket

from server.local.control import ControlLine, EngineNews, GatewayReady, GatewayServes, News, RestartEngine, RestartModel


async def test_control_line_carries_every_kind_of_news_in_order() -> None:
    """What is sent is what is received, and reading ends with the other end."""
    left, right = socket.socketpair()
    sender, receiver = await ControlLine.over(left), await ControlLine.over(right)
    told: list[News] = [
        EngineNews(is_running=True, reason="", restarts=1, gateway_restarts=2, own_engines={"m": "/run/1", "n": ""}),
        GatewayServes(1, 2, 3),
        GatewayReady("triton 2.51.0", ["a"], {"b": "broken\non purpose"}),
        RestartEngine("sick"),
        RestartModel("m", "it hangs", has_own_engine=True),
    ]
    for news in told:
        sender.send(news)
    sender.close()
    async with asyncio.timeout(60):
        heard = [news async for news in receiver.receive()]
    assert heard == told
    receiver.close()
    receiver.send(RestartEngine("nobody hears it"))
