"""Registers the slab at the Tritons on this host: at each when it comes up, and again after it restarted."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.gateway.shared_memory import engine_calls
from penstock.gateway.workers.slab import SharedSlab, SlabMemory, named_memory
from penstock.logs import get_logger
from penstock.protocol.engine import Relay
from penstock.protocol.errors import InferenceError, RegionTaken
from penstock.protocol.shared_memory import RegionKind, SystemRegionSpec, is_slab_name

RETRY_S = 5.0
LOOK_S = 0.5
log = get_logger("slab")


class RegionReader(Protocol):
    """An engine that reads inputs from a registered region."""

    def use_region(self, name: str, lost: Callable[[], None]) -> None:
        """Sends inputs in this region by address from now on. lost: called if the engine loses the region."""
        ...

    def drop_region(self, name: str) -> None:
        """Sends their bytes again."""
        ...


@dataclass(frozen=True, slots=True)
class SlabEngine:
    """An engine that opens the slab. generation: how often it came up."""

    relay: Relay
    reader: RegionReader
    generation: Callable[[], int]


class _Registration:
    """The slab's region at one engine."""

    def __init__(self, engine: SlabEngine) -> None:
        self.engine = engine
        self.has_region = False
        self._known = 0  # generation that opened or rejected the region
        self._is_lost = False
        self._retry_at = 0.0

    def is_due(self, now: float) -> bool:
        """Whether the engine came up since, or has lost the region."""
        return now >= self._retry_at and (self.engine.generation() != self._known or self._is_lost)

    async def register(self, memory: SlabMemory) -> None:
        """Registers the region, unless the engine rejects it. Tried again later if the engine does not answer."""
        generation = self.engine.generation()
        self.forget(memory.name)
        try:
            await self._clear_away()
            with contextlib.suppress(RegionTaken):  # by an earlier try, whose answer was late
                await engine_calls.register(
                    self.engine.relay, SystemRegionSpec(memory.name, f"/{memory.name}", 0, memory.size_bytes)
                )
            self.has_region = True
        except engine_calls.ENGINE_REJECTIONS as error:
            log.info("engine cannot open the shared memory; sending all bytes", reason=error.message)
        except InferenceError as error:
            log.debug("shared memory is not registered yet", reason=error.message)
            self._is_lost, self._retry_at = True, time.monotonic() + RETRY_S
            return
        self.settle(generation)

    def settle(self, generation: int) -> None:
        """Nothing is due until the engine comes up again."""
        self._known, self._is_lost = generation, False

    def use(self, region: str) -> None:
        """Sends inputs in the region by address."""
        self.engine.reader.use_region(region, self._lose)

    def forget(self, region: str) -> None:
        """Sends their bytes."""
        if self.has_region:
            self.engine.reader.drop_region(region)
        self.has_region = False

    def _lose(self) -> None:
        self._is_lost = True

    async def _clear_away(self) -> None:
        """Unregisters the regions of ended gateways, and this one's earlier ones."""
        for name in await engine_calls.system_regions(self.engine.relay):
            if is_slab_name(name) and not _is_alive(name):
                await engine_calls.unregister(self.engine.relay, RegionKind.SYSTEM, name)


class SlabRegistration:
    """Run `run()` as one task. An engine that cannot open the file is sent all bytes.

    A single engine gets new memory each time that it comes up, and the file loses its name at once. Several engines
    share one memory: while one comes up, the others go on reading there. So the file has its name until the end.
    """

    def __init__(
        self, slab: SharedSlab, engines: Sequence[SlabEngine], *, size_bytes: int, published: Path | None = None
    ) -> None:
        """published: file by which models' processes find the memory; None for engines that are not ours."""
        self._slab = slab
        self._engines = [_Registration(engine) for engine in engines]
        self._size_bytes = size_bytes
        self._published = published
        self._region = ""
        self._shared: SlabMemory | None = None  # by several engines
        self._file = contextlib.ExitStack()
        self._sign_of_life: socket.socket | None = None

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                now = time.monotonic()
                if due := [each for each in self._engines if each.is_due(now)]:
                    await self._register(due)
        finally:
            self._forget()

    async def aclose(self) -> None:
        """Unregisters the region at the engines that still answer, after run has ended."""
        region, self._region = self._region, ""
        for each in self._engines if region else ():
            with contextlib.suppress(InferenceError):
                await engine_calls.unregister(each.engine.relay, RegionKind.SYSTEM, region)

    async def _register(self, due: Sequence[_Registration]) -> None:
        memory = self._shared or self._new_memory()
        if memory is None:
            for each in due:
                each.settle(each.engine.generation())
            return
        await asyncio.gather(*(each.register(memory) for each in due))
        if not any(each.has_region for each in self._engines):
            self._forget()
            return
        if len(self._engines) == 1:
            self._file.close()
        else:
            self._shared = memory
        if memory.name != self._region:
            self._begin(memory)
        for each in due:
            if each.has_region:
                each.use(memory.name)

    def _new_memory(self) -> SlabMemory | None:
        """A file that engines can open; None if it cannot be made."""
        self._forget()
        try:
            memory = self._file.enter_context(named_memory(self._size_bytes))
            self._sign_of_life = _liveness_socket(memory.name)
        except OSError as error:
            self._file.close()
            log.warning("cannot make shared memory; sending all bytes", reason=error.strerror)
            return None
        return memory

    def _begin(self, memory: SlabMemory) -> None:
        """Leases from this memory from now on."""
        self._region = memory.name
        self._slab.renew(memory)
        if self._published is not None:
            try:
                self._slab.publish(self._published)
            except OSError as error:
                log.warning("models cannot read pictures in the slab; sending their bytes", reason=error.strerror)

    def _forget(self) -> None:
        for each in self._engines:
            each.forget(self._region)
        self._file.close()
        self._shared = None
        if self._sign_of_life is not None:
            self._sign_of_life.close()
            self._sign_of_life = None


def _liveness_socket(name: str) -> socket.socket:
    """An abstract socket, whose name the kernel removes with the process."""
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    sign.bind(f"\0{name}")
    return sign


def _is_alive(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asking:
        try:
            asking.connect(f"\0{name}")
        except ConnectionRefusedError:
            return False
    return True
