"""The slab at a Triton on this host: registered when the engine comes up, and anew when another one does."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Protocol

from server.core.backend import Relay
from server.core.errors import InferenceError
from server.local.slab import SharedSlab
from server.local.slab_memory import named_memory
from server.logs import get_logger
from server.shared_memory import engine_calls
from server.shared_memory.names import is_slab_name
from server.shared_memory.region import Kind, SystemWish

RETRY_S = 5.0
LOOK_S = 0.5
log = get_logger("slab")


class RegionReader(Protocol):
    """The backend, as far as it reads inputs by their place."""

    def use_region(self, name: str, lost: Callable[[], None]) -> None:
        """Inputs that lie there are named and not sent from now on. lost: called when the engine knows it no more."""
        ...

    def drop_region(self, name: str) -> None:
        """They are sent again."""
        ...


class SlabRegistration:
    """Run `run()` as one task. Where the engine cannot open the file, the slab has no memory and all is sent.

    The file has a name for as long as the engine takes to open it, so nothing is left whoever is killed; another engine
    gets another file. generation: a number that changes when the engine comes up; 0 while it never did.
    """

    def __init__(
        self,
        slab: SharedSlab,
        *,
        size_bytes: int,
        relay: Relay,
        reader: RegionReader,
        generation: Callable[[], int],
    ) -> None:
        self._slab = slab
        self._size_bytes = size_bytes
        self._relay = relay
        self._reader = reader
        self._generation = generation
        self._region = ""
        self._sign_of_life: socket.socket | None = None
        self._is_lost = False

    async def run(self) -> None:
        """For ever. Ends by cancellation, and takes the region back then where the engine still answers."""
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
        """After run has ended: the engine closes its side. It may be gone."""
        region, self._region = self._region, ""
        if region:
            with contextlib.suppress(InferenceError):
                await engine_calls.unregister(self._relay, Kind.SYSTEM, region)

    async def _register(self) -> bool:
        """Whether there is no more to be done with this engine: registered, or refused."""
        self._forget()
        try:
            with named_memory(self._size_bytes) as memory:
                self._sign_of_life = _sign_of_life(memory.name)
                await self._clear_away()
                await engine_calls.register(
                    self._relay, SystemWish(memory.name, f"/{memory.name}", 0, memory.size_bytes)
                )
        except engine_calls.SAID_NO as error:
            log.info("the engine cannot open our memory; it is sent every byte", reason=error.message)
            return True
        except OSError as error:
            log.warning("no shared memory; the engine is sent every byte", reason=error.strerror)
            return True
        except InferenceError as error:
            log.debug("memory is not registered yet", reason=error.message)
            return False
        self._region = memory.name
        self._slab.renew(memory)
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
        """What gateways that are gone, this one's own past included, had the engine open, it closes."""
        for name in await engine_calls.system_regions(self._relay):
            if is_slab_name(name) and not _is_alive(name):
                await engine_calls.unregister(self._relay, Kind.SYSTEM, name)


def _sign_of_life(name: str) -> socket.socket:
    """A socket without a file: the kernel forgets its name with the process."""
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
