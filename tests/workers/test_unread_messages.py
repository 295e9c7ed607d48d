"""A peer that does not read is sent no more than a bounded number of bytes."""

import asyncio
import socket
from pathlib import Path

import msgspec

from penstock.engines.model_health import KnownModel
from penstock.gateway.workers.connection import SOCKET_NAME, ClientHello, CoreState, ToClient, WorkerHello
from penstock.gateway.workers.core_server import UNREAD_BYTES, CoreParts, CoreServer
from tests.support.waiting import until
from tests.workers.test_client_processes import core_in
from tests.workers.test_core_link import FakeEngine, FakeWatch

REASON = "r" * 50_000


def greeting(record: WorkerHello | ClientHello) -> bytes:
    encoded = msgspec.msgpack.encode(record)
    return len(encoded).to_bytes(4, "little") + encoded


def last_state(received: bytes) -> CoreState:
    """Of the records that were received, all of them whole."""
    position = 0
    while position < len(received):
        end = position + 4 + int.from_bytes(received[position : position + 4], "little")
        record = msgspec.msgpack.decode(received[position + 4 : end], type=ToClient)
        position = end
    assert isinstance(record, CoreState)
    return record


async def test_front_that_reads_nothing_is_not_sent_the_same_again_and_again(tmp_path: Path) -> None:
    """What it has not read stays bounded, however long it hangs; changes are sent, and read when it goes on."""
    watch, engine = FakeWatch(models={"m": KnownModel("m", False, REASON)}), FakeEngine()
    server = CoreServer(tmp_path, CoreParts(watch, engine, engine))  # type: ignore[arg-type]
    core = asyncio.create_task(server.run())
    front = socket.socket(socket.AF_UNIX)
    try:
        async with asyncio.timeout(30):
            while not (tmp_path / SOCKET_NAME).exists():
                await asyncio.sleep(0.005)
            front.connect(str(tmp_path / SOCKET_NAME))
            front.sendall(greeting(WorkerHello(1)))
            while not server.front_count:
                await asyncio.sleep(0.005)
            for _ in range(200):
                server._tell(is_due=True)
            (line,) = server._fronts
            assert UNREAD_BYTES < line.unsent_bytes < UNREAD_BYTES + 2 * len(REASON)
            watch.generation = 7
            server._tell(is_due=False)
            unread = line.unsent_bytes
            front.setblocking(False)
            received = b""
            while line.unsent_bytes or len(received) < unread:
                received += await asyncio.get_running_loop().sock_recv(front, 1 << 20)
            core.cancel()
            while piece := await asyncio.get_running_loop().sock_recv(front, 1 << 20):
                received += piece
        assert last_state(received).generation == 7
    finally:
        front.close()
        core.cancel()
        await asyncio.gather(core, return_exceptions=True)
        await asyncio.sleep(0)


async def test_client_process_that_reads_nothing_is_sent_no_changes_until_it_reads(tmp_path: Path) -> None:
    """A stopped program at an engine that comes and goes for days; when it goes on it gets the current state."""
    async with core_in(tmp_path) as core:
        core.watch.models["m"] = KnownModel("m", False, REASON)
        await until((tmp_path / SOCKET_NAME).exists)
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET_NAME)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(greeting(ClientHello("stopped")))
        await until(lambda: core.server.client_process_count)
        (line,) = core.server._fronts
        for generation in range(2, 200):
            core.watch.generation = generation
            core.server._tell(is_due=False)
        assert UNREAD_BYTES < line.unsent_bytes < UNREAD_BYTES + 2 * len(REASON)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        generation_received = 0
        while generation_received < 199:
            size_bytes = int.from_bytes(await reader.readexactly(4), "little")
            record = msgspec.msgpack.decode(await reader.readexactly(size_bytes), type=ToClient)
            generation_received = record.generation if isinstance(record, CoreState) else generation_received
        writer.close()
