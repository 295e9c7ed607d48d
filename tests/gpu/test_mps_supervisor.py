"""The supervisor does what the course says: in order, and no client starts before it may."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.gpu.mps import supervisor
from penstock.gpu.mps.control import DaemonStatus, MpsError, MpsOptions, Server, ServerState
from penstock.gpu.mps.recovery import EngineObservation
from penstock.gpu.mps.supervisor import EngineHandle, MpsState, MpsSupervisor
from tests.support.waiting import until

HERE = DaemonStatus(is_up=True)
FAULT = DaemonStatus(is_up=True, servers=(Server(1, ServerState.FAULT),))
GONE = DaemonStatus(is_up=False, reason="gone")


class Fakes:
    """A daemon of ours and an engine, both scripted; done: what was done to them."""

    is_ours = True
    options = MpsOptions(Path("/nowhere"))

    def __init__(self) -> None:
        self.now = HERE
        self.engine = EngineObservation(10, True, frozenset({10}), frozenset())
        self.done: list[str] = []
        self.message: list[MpsState] = []
        self.starts_fail = 0

    async def start(self) -> None:
        self.done.append("start")
        if self.starts_fail:
            self.starts_fail -= 1
            raise MpsError("no")
        self.now = HERE

    async def stop(self) -> None:
        self.done.append("stop")

    async def status(self) -> DaemonStatus:
        return self.now

    async def look(self, _: bool) -> EngineObservation:
        return self.engine

    def end(self, reason: str, is_lost: bool) -> None:
        self.done.append(f"end {is_lost}")
        self.engine = EngineObservation()

    def handle(self) -> EngineHandle:
        return EngineHandle(self.look, self.end, self.done.append, self.message.append)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    for name in ("OWN_POLL_S", "RECOVERY_POLL_S", "SHORTEST_PAUSE_S"):
        monkeypatch.setattr(supervisor, name, 0.001)
    return Fakes()


@pytest.fixture
async def running(fakes: Fakes) -> AsyncIterator[MpsSupervisor]:
    """Started, and at work."""
    one = MpsSupervisor(fakes, fakes.handle(), must_attach=True)
    await one.start()
    task = asyncio.create_task(one.run())
    yield one
    task.cancel()
    await asyncio.wait({task})


async def test_clients_wait_while_the_server_is_in_fault(fakes: Fakes, running: MpsSupervisor) -> None:
    """A client that asks after a fault began is not let through by what was seen before it."""
    await asyncio.wait_for(running.until_clients_may_start(), 5)
    fakes.now = FAULT
    waiting = asyncio.create_task(running.until_clients_may_start())
    await until(lambda: "end True" in fakes.done)
    await asyncio.sleep(0.02)
    assert not waiting.done()
    fakes.now = HERE
    await asyncio.wait_for(waiting, 5)


async def test_daemon_that_is_gone_is_started_again_until_it_stays(fakes: Fakes, running: MpsSupervisor) -> None:
    """What is left of it is ended first; a start that fails is tried again later."""
    fakes.done.clear()
    fakes.starts_fail = 1
    fakes.now = GONE
    waiting = asyncio.create_task(running.until_clients_may_start())
    await asyncio.wait_for(waiting, 5)
    assert fakes.done == ["end True", "stop", "start", "stop", "start"]
    await until(lambda: fakes.message[-1].is_up)
    assert fakes.message[-1].restarts == 1


async def test_events_are_logged_only_when_they_change(fakes: Fakes, running: MpsSupervisor) -> None:
    """A look a second makes no message a second."""
    await until(lambda: bool(fakes.message))
    await asyncio.sleep(0.02)
    assert fakes.message == [MpsState(is_up=True)]
