"""When a worker begins to listen: a real process, and a fake core that reports on request.

The worker's timeout for its core is an hour if nothing may depend on it, and an instant if it is the subject.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from penstock.gateway.settings import Settings
from penstock.gateway.worker import CORE_TIMEOUT_S, Worker, _until_core_reports
from penstock.gateway.workers.connection import SOCKET_NAME, CoreState, MessageConnection, ToCore, WorkerHello
from penstock.gateway.workers.gateway_process import GatewayPart, GatewayProcess, GatewayServes, WorkerReady
from tests.support.http import Answer, call
from tests.support.waiting import until
from tests.workers.test_core_link import short_path

__all__ = ["short_path"]
pytestmark = pytest.mark.usefixtures("short_path")
PROGRAM = """
from penstock.gateway import __main__, worker
worker.CORE_TIMEOUT_S = {max_wait_s}
__main__.exit_now(__main__.main())
"""
HOUR_S, INSTANT_S = 3600.0, 0.1
REPEATED_S = 0.2  # a core says again and again how the engine is


@dataclass
class Core:
    """Hears fronts that come to `folder`, and says nothing to them before `has_word` is set."""

    folder: Path
    has_word: bool = False
    fronts: list[MessageConnection[ToCore]] = field(default_factory=list)

    def new_line(self) -> MessageConnection[ToCore]:
        return MessageConnection(msgspec.msgpack.Decoder(ToCore), self._hear, lambda _: None)

    def _hear(self, line: MessageConnection[ToCore], record: ToCore) -> None:
        if isinstance(record, WorkerHello):
            self.fronts.append(line)

    async def run(self) -> None:
        """For ever."""
        server = await asyncio.get_running_loop().create_unix_server(self.new_line, str(self.folder / SOCKET_NAME))
        try:
            while True:
                for line in self.fronts if self.has_word else ():
                    line.send(CoreState(True, "", 1, (), ()))
                await asyncio.sleep(REPEATED_S)
        finally:
            server.close()
            for line in self.fronts:
                line.close()


@dataclass
class Front:
    """Of `--workers 2`, the first. ports: REST's and gRPC's."""

    process: GatewayProcess
    ports: tuple[int, int]
    message: list[object]
    running: "asyncio.Task[int]"

    def is_listening(self) -> list[bool]:
        return [accepts(port) for port in self.ports]

    async def ask(self, what: str) -> Answer:
        return await asyncio.to_thread(call, "GET", f"http://127.0.0.1:{self.ports[0]}/v2/health/{what}")

    async def ready_status(self) -> int:
        return (await self.ask("ready")).status


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 10).close()
    except ConnectionRefusedError:
        return False
    return True


@contextmanager
def held_port() -> Iterator[int]:
    """Bound like the parent's, shared with others, and not listening."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@asynccontextmanager
async def begun(run_dir: Path, *, max_wait_s: float) -> AsyncIterator[Front]:
    """Gone afterwards, whatever the test did to it."""
    program = (sys.executable, "-c", PROGRAM.format(max_wait_s=max_wait_s))
    message: list[object] = []
    with held_port() as http_port, held_port() as grpc_port:
        settings = Settings(
            engine="embedded", workers=2, http_port=http_port, grpc_port=grpc_port, drain_delay_s=HOUR_S
        )
        part = GatewayPart("worker 1", ("front-1",))
        process = GatewayProcess(settings.model_dump_json(), run_dir, message.append, program=program, part=part)
        running = asyncio.create_task(process.run())
        try:
            async with asyncio.timeout(60):
                yield Front(process, (http_port, grpc_port), message, running)
        finally:
            process.kill()
            await running


@asynccontextmanager
async def core_in(run_dir: Path) -> AsyncIterator[Core]:
    core = Core(run_dir)
    running = asyncio.create_task(core.run())
    try:
        yield core
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.sleep(0)


async def test_front_accepts_no_connection_before_its_core_spoke(tmp_path: Path) -> None:
    """Its neighbours on the port have them until then: the first answer that it ever gives is that it is ready."""
    async with core_in(tmp_path) as core, begun(tmp_path, max_wait_s=HOUR_S) as front:
        await until(lambda: core.fronts)
        assert front.is_listening() == [False, False]
        assert not front.message
        core.has_word = True
        await until(lambda: accepts(front.ports[0]))
        assert await front.ready_status() == 200
        await until(lambda: len(front.message) == 2)
        assert [type(message) for message in front.message] == [GatewayServes, WorkerReady]
        assert front.is_listening() == [True, True]


async def test_front_listens_without_its_core_after_its_timeout(tmp_path: Path) -> None:
    """It lives, and says why it is not ready, if the core is absent or silent; it serves once the core speaks."""
    async with begun(tmp_path, max_wait_s=INSTANT_S) as front:
        await check_unready(front)
        async with core_in(tmp_path) as core:
            await until(lambda: core.fronts)
            await check_unready(front)
            core.has_word = True
            while await front.ready_status() != 200:
                await asyncio.sleep(0.05)


async def check_unready(front: Front) -> None:
    await until(lambda: all(front.is_listening()))
    assert (await front.ask("live")).status == 200
    ready = await front.ask("ready")
    assert ready.status == 503
    assert "core" in ready.json["reason"]


async def test_front_stopped_before_its_core_spoke_ends_at_once() -> None:
    """It waits for its core no longer; it has accepted nothing, so there is nothing to drain."""
    front = cast(Worker, SimpleNamespace(link=SimpleNamespace(first_state=asyncio.Event())))
    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(CORE_TIMEOUT_S / 2):
        await _until_core_reports(front, stop)
