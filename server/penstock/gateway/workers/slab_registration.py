"""Registers the slab at a Triton on this host when the engine comes up, and again after it restarted."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from penstock.gateway.shared_memory import engine_calls
from penstock.gateway.workers.slab import SharedSlab, named_memory
from penstock.logs import get_logger
from penstock.protocol.engine import Relay
from penstock.protocol.errors import InferenceError
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


class SlabRegistration:
    """Run `run()` as one task. If the engine cannot open the file, all bytes are sent. generation: of the engine."""

    def __init__(
        self,
        slab: SharedSlab,
        *,
        size_bytes: int,
        relay: Relay,
        reader: RegionReader,
        generation: Callable[[], int],
        published: Path | None = None,
    ) -> None:
        """published: file by which models' processes find the memory; None for an engine that is not ours."""
        self._slab = slab
        self._size_bytes = size_bytes
        self._relay = relay
        self._reader = reader
        self._generation = generation
        self._published = published
        self._region = ""
        self._sign_of_life: socket.socket | None = None
        self._is_lost = False

    async def run(self) -> None:
        """Runs until cancelled; then unregisters the region if the engine still answers."""
        known, pause_s = 0, LOOK_S
        try:
            while True:
                await asyncio.sleep(pause_s)
                pause_s = LOOK_S
                generation = self._generation()
                if generation == known and not self._is_lost:
                    continue
                self._is_lost = False
                if await self._register():
                    known = generation
                else:
                    pause_s, self._is_lost = RETRY_S, True
        finally:
            self._forget()

    async def aclose(self) -> None:
        """Unregisters the region at the engine, after run has ended."""
        region, self._region = self._region, ""
        if region:
            with contextlib.suppress(InferenceError):
                await engine_calls.unregister(self._relay, RegionKind.SYSTEM, region)

    async def _register(self) -> bool:
        """Returns whether this engine needs no further try: registered, or rejected."""
        self._forget()
        try:
            with named_memory(self._size_bytes) as memory:
                self._sign_of_life = _liveness_socket(memory.name)
                await self._clear_away()
                await engine_calls.register(
                    self._relay, SystemRegionSpec(memory.name, f"/{memory.name}", 0, memory.size_bytes)
                )
        except engine_calls.ENGINE_REJECTIONS as error:
            log.info("engine cannot open the shared memory; sending all bytes", reason=error.message)
            return True
        except OSError as error:
            log.warning("cannot make shared memory; sending all bytes", reason=error.strerror)
            return True
        except InferenceError as error:
            log.debug("shared memory is not registered yet", reason=error.message)
            return False
        self._region = memory.name
        self._slab.renew(memory)
        if self._published is not None:
            try:
                self._slab.publish(self._published)
            except OSError as error:
                log.warning("models cannot read pictures in the slab; sending their bytes", reason=error.strerror)
        self._reader.use_region(memory.name, self._lose)
        return True

    def _lose(self) -> None:
        self._is_lost = True

    def _forget(self) -> None:
        if self._region:
            self._reader.drop_region(self._region)
        if self._sign_of_life is not None:
            self._sign_of_life.close()
            self._sign_of_life = None

    async def _clear_away(self) -> None:
        """Unregisters the regions of ended gateways, and this one's earlier ones."""
        for name in await engine_calls.system_regions(self._relay):
            if is_slab_name(name) and not _is_alive(name):
                await engine_calls.unregister(self._relay, RegionKind.SYSTEM, name)


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
