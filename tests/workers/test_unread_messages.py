"""A peer that does not read is sent no more than a bounded number of bytes."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.engines.model_health import KnownModel
from penstock.gateway.workers.connection import SOCKET_NAME, ClientHello, CoreState, ToClient, WorkerHello
from penstock.gateway.workers.core_server import UNREAD_BYTES
from tests.support.waiting import until
from tests.workers.test_client_processes import core_in

REASON = "r" * 50_000


def greeting(record: WorkerHello | ClientHello) -> bytes:
    encoded = msgspec.msgpack.encode(record)
    return len(encoded).to_bytes(4, "little") + encoded


@pytest.mark.parametrize(
    ("hello", "is_repeated"), [(WorkerHello(1), True), (ClientHello("stopped"), False)], ids=["front", "client process"]
)
async def test_peer_that_reads_nothing_is_not_sent_more_and_more(
    tmp_path: Path, hello: WorkerHello | ClientHello, is_repeated: bool
) -> None:
    """Neither repetitions nor, to a client process, changes; a front gets each. Who goes on gets the current state."""
    async with core_in(tmp_path) as core:
        core.watch.models["m"] = KnownModel("m", False, REASON)
        await until((tmp_path / SOCKET_NAME).exists)
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET_NAME)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(greeting(hello))
        await until(lambda: core.server._fronts)
        (line,) = core.server._fronts
        for generation in range(2, 200):
            core.watch.generation = 2 if is_repeated else generation
            core.server._tell(is_due=is_repeated)
        unread = line.unsent_bytes
        assert UNREAD_BYTES < unread < UNREAD_BYTES + 2 * len(REASON)
        core.watch.generation = 200
        core.server._tell(is_due=False)
        assert (line.unsent_bytes > unread) is isinstance(hello, WorkerHello)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        generation_received = 0
        while generation_received < 200:
            size_bytes = int.from_bytes(await reader.readexactly(4), "little")
            record = msgspec.msgpack.decode(await reader.readexactly(size_bytes), type=ToClient)
            generation_received = record.generation if isinstance(record, CoreState) else generation_received
        writer.close()
