"""The parent's hold on its gateway process: started, started again, renewed, stopped at the worst moment."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from penstock.gateway.workers.gateway_process import (
    EXIT_CANNOT_START,
    MAX_FAILED_STARTS,
    ControlConnection,
    ControlMessage,
    EngineStatusMessage,
    GatewayProcess,
    GatewayReady,
    GatewayServes,
    RestartEngine,
    RestartModel,
)
from tests.support.waiting import until

COUNTED = "from pathlib import Path; p = Path({file!r}); p.write_text(p.read_text() + 'x' if p.exists() else 'x'); "
SERVES = (
    "import os, sys; os.write(int(sys.argv[2]), "
    """b'{"type": "GatewayServes", "http_port": 1, "grpc_port": 2, "metrics_port": 3}\\n'); """
)
DIES = "raise SystemExit(3)"
SLEEPS = "import time; time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def gateway_that(tmp_path: Path, script: str) -> tuple[GatewayProcess, Path, list[object]]:
    """The process, the file with one letter for each of its starts, and the news that came."""
    starts, message = tmp_path / "starts", []
    program = (sys.executable, "-c", COUNTED.format(file=str(starts)) + script)
    return GatewayProcess("{}", tmp_path, message.append, program=program), starts, message


@asynccontextmanager
async def in_time(timeout_s: float = 20.0) -> AsyncIterator[None]:
    async with asyncio.timeout(timeout_s):
        yield


async def test_gateway_process_stopped_in_its_pause_is_not_started_again(tmp_path: Path) -> None:
    """It had died and waits to be started: stop ends the waiting, and nothing is started behind its back."""
    gateway, starts, _ = gateway_that(tmp_path, SERVES + DIES)
    async with in_time():
        task = asyncio.create_task(gateway.run())
        await until(lambda: gateway.restarts == 3)  # the pause is now 0.6 s at least
        had = starts.read_text()
        await gateway.stop(5.0)
        await task
    assert starts.read_text() == had


async def test_gateway_process_stopped_before_it_listens_for_signals_ends_well(tmp_path: Path) -> None:
    """SIGTERM while Python still imports: nothing was accepted, so nothing is wrong."""
    gateway, starts, _ = gateway_that(tmp_path, SLEEPS)
    async with in_time():
        task = asyncio.create_task(gateway.run())
        await until(starts.exists)
        await gateway.stop(5.0)
        assert await task == 0


async def test_gateway_process_stopped_while_it_is_made_ends_well(tmp_path: Path) -> None:
    """Between the decision to start it and its process there is a moment too."""
    gateway, _, _ = gateway_that(tmp_path, SLEEPS)
    async with in_time():
        task = asyncio.create_task(gateway.run())
        await asyncio.sleep(0)
        await gateway.stop(5.0)
        assert await task == 0


async def test_gateway_process_that_never_serves_is_given_up(tmp_path: Path) -> None:
    """A start that cannot succeed ends the stack with a code that says so, and one line; it does not loop for ever."""
    gateway, starts, _ = gateway_that(tmp_path, DIES)
    with structlog.testing.capture_logs() as logged:
        async with in_time():
            assert await gateway.run() == EXIT_CANNOT_START
    assert len(starts.read_text()) == MAX_FAILED_STARTS
    assert logged[-1]["event"] == "gateway cannot start; the lines above say why"


async def test_gateway_process_that_served_once_is_started_for_ever(tmp_path: Path) -> None:
    """Who has served is worth more attempts than a broken installation."""
    gateway, starts, message = gateway_that(tmp_path, SERVES + DIES)
    async with in_time():
        task = asyncio.create_task(gateway.run())
        await until(lambda: gateway.restarts > MAX_FAILED_STARTS)
        await gateway.stop(5.0)
        await task
    assert len(starts.read_text()) > MAX_FAILED_STARTS
    assert len(message) > MAX_FAILED_STARTS


async def test_gateway_process_renewed_is_started_again_and_counts_no_death(tmp_path: Path) -> None:
    """Renewed with its engine, once for any number of requests, it comes back; it did not die."""
    gateway, starts, message = gateway_that(tmp_path, SERVES + SLEEPS)
    async with in_time():
        task = asyncio.create_task(gateway.run())
        assert not gateway.renew(5.0)  # there is no process yet
        await until(lambda: len(message) == 1)
        assert gateway.renew(5.0)
        assert not gateway.renew(5.0)
        await until(lambda: len(message) == 2)
        assert (starts.read_text(), gateway.restarts) == ("xx", 0)
        await gateway.stop(5.0)
        await task


async def test_gateway_process_that_does_not_end_when_renewed_is_killed(tmp_path: Path) -> None:
    """An engine that blocks its process does not block the stack: after the timeout another one starts."""
    gateway, starts, message = gateway_that(tmp_path, DEAF + SERVES + SLEEPS)
    async with in_time():
        task = asyncio.create_task(gateway.run())
        await until(lambda: len(message) == 1)
        gateway.renew(0.1)
        await until(lambda: len(message) == 2)
        assert starts.read_text() == "xx"
        gateway.kill()
        await task


async def test_gateway_process_keeps_its_settings_to_its_user(tmp_path: Path) -> None:
    """The file with the settings is readable by its owner only."""
    gateway_that(tmp_path, DIES)
    assert (tmp_path / "settings.json").stat().st_mode & 0o077 == 0


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
