"""Connections of clients that one worker hands over to another."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from penstock.gateway.rest.listener import HttpListener
from penstock.gateway.workers.connection_sharing import ConnectionSharing, worker_for
from penstock.gateway.workers.shared_counters import CounterPage, CounterRow
from penstock.network import bind

WORKERS = 4


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [(5, {2: 4, 3: 9}, None), (5, {2: 3, 3: 9}, 2), (9, {2: 3, 3: 1}, 3), (0, {2: 0}, None), (7, {}, None)],
    ids=["one less", "two less", "the one with least", "none open", "no other"],
)
def test_worker_with_clearly_fewer_connections_gets_a_new_one(
    own: int, others: dict[int, int], chosen: int | None
) -> None:
    """A difference of one is not worth a move."""
    assert worker_for(own, others) == chosen


async def named(name: str, scope: Scope, _: Receive, send: Send) -> None:
    """An application that answers with the worker's name."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": name.encode()})


class Workers:
    """Listeners of four workers in one process. All clients connect to the first one."""

    def __init__(self, folder: Path) -> None:
        self.page = CounterPage(folder / "page")
        for index in range(1, WORKERS + 1):
            self.page.write(CounterRow.BEATS, index, 1)
        self.sharing = {n: ConnectionSharing(folder, n, WORKERS, self.page) for n in range(1, WORKERS + 1)}
        self.listeners = {
            n: HttpListener(
                partial(named, str(n)), bind("127.0.0.1", 0, flag=""), is_elsewhere=self.sharing[n].hand_over
            )
            for n in self.sharing
        }
        for n, listener in self.listeners.items():
            listener.start()
            self.sharing[n].start(listener.take)

    async def served_by(self) -> tuple[str, asyncio.StreamWriter]:
        """The worker that answers on a new connection, which stays open."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listeners[1].port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        return (await reader.readexactly(1)).decode(), writer


@asynccontextmanager
async def four_workers(folder: Path) -> AsyncIterator[Workers]:
    async with asyncio.timeout(30):
        workers = Workers(folder)
        await asyncio.sleep(0)
        yield workers
        for n, listener in workers.listeners.items():
            if n in workers.sharing:
                workers.sharing[n].close()
            await listener.stop(1.0)


async def test_connections_of_one_listener_are_served_by_all_workers(tmp_path: Path) -> None:
    """All requests are answered, and the busiest worker has few more connections than the others."""
    random.seed(5)
    async with four_workers(tmp_path) as workers:
        served = [await workers.served_by() for _ in range(40)]
        counts = [listener.connection_count for listener in workers.listeners.values()]
        assert sum(counts) == 40
        assert max(counts) - min(counts) <= 2
        assert {name for name, _ in served} == {"1", "2", "3", "4"}
        for _, writer in served:
            writer.close()


async def test_connection_stays_where_the_other_worker_cannot_take_it(tmp_path: Path) -> None:
    """A worker that is gone, or has not begun, gets none."""
    async with four_workers(tmp_path) as workers:
        workers.page.write(CounterRow.BEATS, 2, 0)
        for number in (3, 4):
            workers.sharing.pop(number).close()
        served = [await workers.served_by() for _ in range(12)]
        assert {name for name, _ in served} == {"1"}
        for _, writer in served:
            writer.close()
