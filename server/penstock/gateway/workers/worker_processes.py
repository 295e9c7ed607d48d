"""Worker processes as their parent sees them: started together, replaced when one dies or hangs, drained together."""

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from penstock.gateway.workers.gateway_process import FRONT, GatewayPart, GatewayProcess, WorkerReady
from penstock.gateway.workers.shared_counters import (
    CORE,
    HEARTBEAT_LOOK_S,
    PAGE_NAME,
    TABLE_NAME,
    CounterPage,
    CounterRow,
    Heartbeats,
    QuotaTable,
)
from penstock.logs import get_logger
from penstock.network import family_of, host_and_port

Address = tuple[str, int]
log = get_logger("stack")


class AddressUnavailable(OSError):
    """An address cannot be reserved for the workers. The message names it."""


class WorkerProcesses:
    """`count` workers, whose addresses stay reserved. on_change: called when a worker is ready or died."""

    def __init__(self, settings_json: str, run_dir: Path, addresses: tuple[Address, ...], count: int) -> None:
        """Raises AddressUnavailable."""
        self._held = [_reserve_address(*address) for address in addresses]
        self._page = CounterPage(run_dir / PAGE_NAME)
        self._quotas = QuotaTable(run_dir / TABLE_NAME, CORE)
        self._fronts: dict[int, GatewayProcess] = {}
        for index in range(1, count + 1):
            part = GatewayPart(f"worker {index}", (f"{FRONT}{index}",), partial(self._died, index))
            self._fronts[index] = GatewayProcess(settings_json, run_dir, self._hear, part=part)
        self._ready: set[int] = set()
        self._is_stopping = False
        self.on_change: Callable[[], None] = lambda: None

    @property
    def are_ready(self) -> bool:
        """Whether every worker has been ready once."""
        return len(self._ready) == len(self._fronts)

    @property
    def restarts(self) -> int:
        return sum(front.restarts for front in self._fronts.values())

    async def run(self) -> int:
        """Runs until all have been stopped, or one cannot start. Returns its exit code; after a stop, the worst."""
        running = {asyncio.create_task(front.run()) for front in self._fronts.values()}
        watching = asyncio.create_task(self._watch())
        try:
            done, pending = await asyncio.wait({*running, watching}, return_when=asyncio.FIRST_COMPLETED)
            pending.discard(watching)
            code = max(task.result() for task in done)
            if pending and not self._is_stopping:
                return code
            return max(code, *(await asyncio.gather(*pending)), 0)
        finally:
            watching.cancel()
            for held in self._held:
                held.close()

    async def stop(self, max_wait_s: float) -> None:
        """Drains all, and kills those that take longer. `run` then returns."""
        self._is_stopping = True
        await asyncio.gather(*(front.stop(max_wait_s) for front in self._fronts.values()))

    def kill(self) -> None:
        self._is_stopping = True
        for front in self._fronts.values():
            front.kill()

    async def _watch(self) -> NoReturn:
        """Kills workers that hang, for ever; each is then replaced."""
        heartbeats = Heartbeats()
        while True:
            await asyncio.sleep(HEARTBEAT_LOOK_S)
            beats = {index: self._page.read(CounterRow.BEATS, index) for index in self._fronts}
            hanging = heartbeats.look(beats, time.monotonic())
            for index, silent_s in () if self._is_stopping else hanging.items():
                log.error(f"worker {index} hangs; killing it", silent_s=round(silent_s, 1))
                self._fronts[index].cut_off()

    def _hear(self, message: object) -> None:
        if isinstance(message, WorkerReady):
            self._ready.add(message.index)
            self.on_change()

    def _died(self, index: int) -> None:
        """Clears its counts of requests in flight."""
        self._page.clear(index)
        self._quotas.clear(index)
        self.on_change()


def _reserve_address(host: str, port: int) -> socket.socket:
    """Bound, but not listening: connections go to the processes that listen there."""
    held = socket.socket(family_of(host), socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise AddressUnavailable(f"cannot listen on {host_and_port(host, port)} ({error.strerror})") from error
    return held
