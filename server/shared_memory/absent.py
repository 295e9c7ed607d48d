"""The gateway that shares no memory: every question about regions gets the sentence that says why."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from server.core.caller import Caller
from server.core.errors import NotSupported
from server.core.relay import RegionUse
from server.shared_memory.region import Kind, Region, Wish

SWITCHED_OFF = (
    "shared memory is off, since a client that may name a segment of this machine may read and write it, and may end "
    "the engine by cutting it; send tensors in the request, or start the gateway with --allow-client-shm"
)
SEVERAL = (
    "the engine is several, and a region that is known to one of them is not to the others; send tensors in the request"
)
ELSEWHERE = "the engine is on another host and shares no memory with clients of this one; send tensors in the request"


class NoSharedMemory:
    """Stands where SharedMemory would. Its methods raise NotSupported."""

    def __init__(self, refusal: str = SWITCHED_OFF) -> None:
        self.refusal = refusal

    async def register(self, wish: Wish, caller: Caller) -> None:
        """Raises NotSupported."""
        raise NotSupported(self.refusal)

    async def unregister(self, kind: Kind, name: str, caller: Caller) -> None:
        """Raises NotSupported."""
        raise NotSupported(self.refusal)

    async def unregister_own(self, kind: Kind, caller: Caller) -> None:
        """Raises NotSupported."""
        raise NotSupported(self.refusal)

    def status(self, kind: Kind, caller: Caller, name: str = "") -> list[Region]:
        """Raises NotSupported."""
        raise NotSupported(self.refusal)

    @contextmanager
    def held(self, uses: Collection[RegionUse], caller: Caller) -> Iterator[None]:
        """Raises NotSupported."""
        if self.refusal:
            raise NotSupported(self.refusal)
        yield
