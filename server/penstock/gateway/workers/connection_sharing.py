"""Balances connections between workers: a worker with more connections than another hands new ones over to it.

The kernel distributes connections by their addresses: of 384 on 11 workers, the busiest gets a quarter more than the
mean, and its clients wait longest.
"""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from penstock.gateway.workers.shared_counters import CounterPage, CounterRow
from penstock.logs import get_logger

TRIED = 2  # other workers whose counts are compared: of many that see the same counts, few choose the same one
_RECEIVED_AT_ONCE = 16

log = get_logger("connections")


def worker_for(own: int, others: dict[int, int]) -> int | None:
    """The worker that gets a new connection instead of this one, or None. own, others: open connections; by worker."""
    least = min(others, key=others.__getitem__, default=None)
    return least if least is not None and others[least] + 1 < own else None


class ConnectionSharing:
    """Sends and receives connections of clients over a Unix socket of each worker, in the stack's folder."""

    def __init__(self, run_dir: Path, index: int, workers: int, page: CounterPage) -> None:
        """index: of this worker; from 1 to workers."""
        self._run_dir, self._index, self._page = run_dir, index, page
        self._others = [number for number in range(1, workers + 1) if number != index]
        self._sent: dict[int, tuple[int, int]] = {}  # by worker: what it had written, and its connections by now
        self._take: Callable[[socket.socket], None] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        path = self._path(index)
        path.unlink(missing_ok=True)
        self._socket.bind(str(path))

    def start(self, take: Callable[[socket.socket], None]) -> None:
        """Receives until closed. take: gets each connection that another worker hands over."""
        self._take = take
        asyncio.get_running_loop().add_reader(self._socket, self._receive, take)

    def hand_over(self, descriptor: int, own: int) -> bool:
        """Whether another worker got the new connection. descriptor: to be closed here then. own: open connections."""
        tried = random.sample(self._others, min(TRIED, len(self._others)))
        living = {each: self._count(each) for each in tried if self._page.read(CounterRow.BEATS, each)}
        chosen = worker_for(own, living)
        is_sent = chosen is not None and self._send(descriptor, chosen)
        if is_sent and chosen is not None:
            self._sent[chosen] = self._page.read(CounterRow.CONNECTIONS, chosen), living[chosen] + 1
        self._page.write(CounterRow.CONNECTIONS, self._index, own + (not is_sent))
        return is_sent

    def close(self) -> None:
        """Takes what was sent to this worker; from now on others keep their connections."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._path(self._index).unlink(missing_ok=True)
        if self._take is not None:
            self._receive(self._take)
        self._socket.close()

    def _count(self, index: int) -> int:
        """The other's connections, with those that it was sent since it last wrote their number."""
        written = self._page.read(CounterRow.CONNECTIONS, index)
        before, counted = self._sent.get(index, (-1, 0))
        return counted if written == before else written

    def _send(self, descriptor: int, chosen: int) -> bool:
        try:
            rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor)
            self._socket.sendmsg(
                [b"\0"], [rights], 0, str(self._path(chosen))
            )  # send_fds of Python 3.11 has no address
        except OSError:  # it is being replaced, or has too many that it has not received
            return False
        return True

    def _receive(self, take: Callable[[socket.socket], None]) -> None:
        for _ in range(_RECEIVED_AT_ONCE):
            try:
                descriptors = socket.recv_fds(self._socket, 1, 1)[1]
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("cannot receive a connection of another worker", error=error.strerror)
                return
            for descriptor in descriptors:
                own = self._page.read(CounterRow.CONNECTIONS, self._index)
                self._page.write(CounterRow.CONNECTIONS, self._index, own + 1)
                with contextlib.suppress(OSError):  # the client has left
                    take(socket.socket(fileno=descriptor))

    def _path(self, index: int) -> Path:
        return self._run_dir / f"connections-{index}.sock"
