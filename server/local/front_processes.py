"""The parent's hold on its fronts: started beside each other, each replaced when it dies or hangs, drained together."""

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from server.core.address import authority
from server.local.control import FrontReady
from server.local.gateway_process import FRONT, GatewayProcess, Part
from server.local.heartbeats import LOOK_S, Heartbeats
from server.local.limits_page import CORE, PAGE_NAME, LimitsPage, Row
from server.local.quota_table import TABLE_NAME, QuotaTable
from server.logs import get_logger
from server.loopback import family_of

Address = tuple[str, int]
log = get_logger("stack")


class AddressHeld(OSError):
    """An address cannot be held for the fronts. The message names it."""


class FrontProcesses:
    """`count` fronts. Their addresses are held from the start, so that nobody takes one while a front is replaced.

    on_change: told when a front is ready, and when one has died.
    """

    def __init__(self, settings_json: str, run_dir: Path, addresses: tuple[Address, ...], count: int) -> None:
        """Raises AddressHeld."""
        self._held = [_hold(*address) for address in addresses]
        self._page = LimitsPage(run_dir / PAGE_NAME)
        self._quotas = QuotaTable(run_dir / TABLE_NAME, CORE)
        self._fronts = {index: self._new(settings_json, run_dir, index) for index in range(1, count + 1)}
        self._ready: set[int] = set()
        self._is_stopping = False
        self.on_change: Callable[[], None] = lambda: None

    @property
    def are_ready(self) -> bool:
        """Whether every front has been ready once."""
        return len(self._ready) == len(self._fronts)

    @property
    def restarts(self) -> int:
        """Of all fronts together."""
        return sum(front.restarts for front in self._fronts.values())

    async def run(self) -> int:
        """Until all have been stopped, or one of them cannot start; its exit code, the worst of all where stopped."""
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

    async def stop(self, patience_s: float) -> None:
        """Drain them all; kill those that take longer. `run` then returns."""
        self._is_stopping = True
        await asyncio.gather(*(front.stop(patience_s) for front in self._fronts.values()))

    def kill(self) -> None:
        """At once, with their children."""
        self._is_stopping = True
        for front in self._fronts.values():
            front.kill()

    async def _watch(self) -> NoReturn:
        """Kill those that hang, for ever; each is then replaced as one that died."""
        heartbeats = Heartbeats()
        while True:
            await asyncio.sleep(LOOK_S)
            beats = {index: self._page.read(Row.BEATS, index) for index in self._fronts}
            hanging = heartbeats.look(beats, time.monotonic())
            for index, silent_s in () if self._is_stopping else hanging.items():
                log.error(f"front {index} hangs; killing it", silent_s=round(silent_s, 1))
                self._fronts[index].cut_off()

    def _new(self, settings_json: str, run_dir: Path, index: int) -> GatewayProcess:
        part = Part(f"front {index}", (f"{FRONT}{index}",), partial(self._died, index))
        return GatewayProcess(settings_json, run_dir, self._hear, part=part)

    def _hear(self, news: object) -> None:
        if isinstance(news, FrontReady):
            self._ready.add(news.index)
            self.on_change()

    def _died(self, index: int) -> None:
        """Nothing that it had in flight is in flight any more."""
        self._page.clear(index)
        self._quotas.clear(index)
        self.on_change()


def _hold(host: str, port: int) -> socket.socket:
    """Bound and not listening: connections go to those who listen there, too."""
    held = socket.socket(family_of(host), socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise AddressHeld(f"cannot listen on {authority(host, port)} ({error.strerror})") from error
    return held
