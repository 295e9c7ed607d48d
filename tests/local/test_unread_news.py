"""A front that hangs is told no more than it may ever read."""

import asyncio
import socket
from pathlib import Path

import msgspec

from server.backends.watch import KnownModel
from server.local.batch_line import SOCKET_NAME
from server.local.core_server import UNREAD_BYTES, CoreServer
from server.local.messages import DOWN, Hello, State, Visit
from tests.local.test_core_link import FakeEngine, FakeWatch, until
from tests.local.test_guests import core_in

REASON = "r" * 50_000


def greeting(record: Hello | Visit) -> bytes:
    encoded = msgspec.msgpack.encode(record)
    return len(encoded).to_bytes(4, "little") + encoded


def last_state(received: bytes) -> State:
    """Of the records that were received, all of them whole."""
    position = 0
    while position < len(received):
        end = position + 4 + int.from_bytes(received[position : position + 4], "little")
        record = msgspec.msgpack.decode(received[position + 4 : end], type=DOWN)
        position = end
    assert isinstance(record, State)
    return record


async def test_front_that_reads_nothing_is_not_told_the_same_again_and_again(tmp_path: Path) -> None:
    """What it has not read stays bounded, however long it hangs; what is new is told, and read when it goes on."""
    watch, engine = FakeWatch(models={"m": KnownModel("m", False, REASON)}), FakeEngine()
    server = CoreServer(tmp_path, watch, engine, engine)  # type: ignore[arg-type]
    core = asyncio.create_task(server.run())
    front = socket.socket(socket.AF_UNIX)
    try:
        async with asyncio.timeout(30):
            while not (tmp_path / SOCKET_NAME).exists():
                await asyncio.sleep(0.005)
            front.connect(str(tmp_path / SOCKET_NAME))
            front.sendall(greeting(Hello(1)))
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


async def test_guest_that_reads_nothing_is_told_no_news_at_all_until_it_reads(tmp_path: Path) -> None:
    """A stopped program at an engine that comes and goes for days; when it goes on it is told how things are then."""
    async with core_in(tmp_path) as core:
        core.watch.models["m"] = KnownModel("m", False, REASON)
        await until((tmp_path / SOCKET_NAME).exists)
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET_NAME)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(greeting(Visit("stopped")))
        await until(lambda: core.server.guest_count)
        (line,) = core.server._fronts
        for generation in range(2, 200):
            core.watch.generation = generation
            core.server._tell(is_due=False)
        assert UNREAD_BYTES < line.unsent_bytes < UNREAD_BYTES + 2 * len(REASON)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        heard = 0
        while heard < 199:
            size_bytes = int.from_bytes(await reader.readexactly(4), "little")
            record = msgspec.msgpack.decode(await reader.readexactly(size_bytes), type=DOWN)
            heard = record.generation if isinstance(record, State) else heard
        writer.close()
