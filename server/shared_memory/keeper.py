"""The regions that clients share with the engine: registered there, watched, and taken back when nobody needs them."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from server.core.backend import Relay
from server.core.caller import Caller
from server.core.errors import BackendFailed, InferenceError, InvalidRequest, NotSupported, RegionNotFound
from server.core.relay import RegionUse
from server.logs import get_logger
from server.shared_memory import connections, engine_calls
from server.shared_memory.names import check_region_name, is_slab_name, segment_of
from server.shared_memory.region import (
    HANDLE_BYTES,
    CudaWish,
    Kind,
    OpenSegment,
    Region,
    Segment,
    SystemWish,
    Wish,
    kind_of,
)
from server.shared_memory.registry import Registry, RegistryLimits

SWEEP_S = 1.0
DRAIN_S = 5.0
_DRAIN_STEP_S = 0.05
_MAX_BYTES = 2**63 - 1
log = get_logger("shared_memory")


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What must be known of the engine.

    is_ours: nobody else registers anything there. takes_offsets: a region may begin inside its segment; Triton 2.51
    adds such an offset twice, and so reads and writes memory of its own. has_cuda: it takes regions of a GPU's memory.
    """

    is_ours: bool
    takes_offsets: bool
    has_cuda: bool = True


class SharedMemory:
    """One engine's regions. Call it from the event loop; `run` must run beside it.

    generation: a number that changes whenever the engine comes up again, which has no regions then.
    """

    refusal = ""

    def __init__(
        self,
        relay: Relay,
        traits: EngineTraits,
        *,
        limits: RegistryLimits,
        open_segment: OpenSegment,
        generation: Callable[[], int],
        find_gone: Callable[[Collection[str]], set[str]] = connections.gone,
    ) -> None:
        self._relay = relay
        self._traits = traits
        self._open_segment = open_segment
        self._generation = generation
        self._find_gone = find_gone
        self._registry = Registry(limits)
        self._known_generation: int | None = None
        self._stale: set[tuple[Kind, str]] = set()
        self._turn = asyncio.Lock()

    async def register(self, wish: Wish, caller: Caller) -> None:
        """The engine has the region. Raises of the InferenceError tree, in Triton's words where it has some."""
        region = Region(wish, caller, self._checked(wish))
        try:
            await self._make_room(wish.name, caller)
            async with self._turn:
                await self._renew()
                self._registry.claim(region, time.monotonic())
                await self._register(region)
        except BaseException:
            if region not in self._registry:
                _close(region)
            raise

    async def unregister(self, kind: Kind, name: str, caller: Caller) -> None:
        """What the caller may use by that name, else nothing. Raises BackendFailed where a request uses it."""
        self._require(kind)
        async with self._turn:
            await self._renew()
            with suppress(RegionNotFound):
                for region in self._registry.status(kind, caller, name):
                    await self._unregister(region)

    async def unregister_own(self, kind: Kind, caller: Caller) -> None:
        """Everything of that kind which the caller registered, and nothing else.

        Raises BackendFailed, in Triton's words, where requests use some of it; the rest is unregistered.
        """
        self._require(kind)
        await self._note_gone()
        kept: list[str] = []
        async with self._turn:
            await self._renew()
            for region in self._registry.own(kind, caller):
                try:
                    await self._unregister(region)
                except BackendFailed:
                    kept.append(region.name)
        if kept:
            names = "".join(f"{name} ," for name in kept)
            raise BackendFailed(f"Failed to unregister the following {kind} shared memory regions: {names}")

    def status(self, kind: Kind, caller: Caller, name: str = "") -> list[Region]:
        """What the caller may use, or one of it. Raises RegionNotFound in Triton's words."""
        self._require(kind)
        self._check_generation()
        return self._registry.status(kind, caller, name)

    @contextmanager
    def held(self, uses: Collection[RegionUse], caller: Caller) -> Iterator[None]:
        """The regions stay while a request uses them.

        Raises RegionNotFound, and InvalidRequest for what lies beyond a region's end or its segment's: either would end
        the engine.
        """
        self._check_generation()
        regions = {use.name: self._registry.find(use, caller) for use in uses}
        for region in regions.values():
            _check_segment(region)
        self._registry.enter(regions, time.monotonic())
        is_answered = False
        try:
            yield
            is_answered = True
        finally:
            self._registry.leave(regions.values(), time.monotonic(), is_answered=is_answered)

    async def run(self) -> None:
        """Take back what is due, for ever. Ends by cancellation only."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._check_generation()
            await self._note_gone()
            try:
                async with self._turn:
                    await self._renew()
                    await self._take_back()
            except InferenceError as error:
                log.debug("regions stay for now", reason=error.message)

    def close(self) -> None:
        """Let go of every segment."""
        for region in self._registry.forget_all():
            _close(region)

    # what metrics read

    def count(self) -> int:
        """Regions now."""
        return len(self._registry)

    def size_bytes(self) -> int:
        """Of all regions together."""
        return self._registry.size_bytes()

    def lost(self) -> dict[tuple[str, ...], float]:
        """How many regions went that nobody unregistered, by reason."""
        return {(reason,): count for reason, count in self._registry.lost.items()}

    # inside

    def _require(self, kind: Kind) -> None:
        if kind is Kind.CUDA and not self._traits.has_cuda:
            raise NotSupported("this engine shares no GPU memory; use system shared memory, or --engine triton")

    def _checked(self, wish: Wish) -> Segment | None:
        """The segment, open. Raises InvalidRequest for what the engine must not be asked."""
        self._require(kind_of(wish))
        check_region_name(wish.name)
        if isinstance(wish, CudaWish):
            if len(wish.raw_handle) != HANDLE_BYTES or not 0 < wish.size_bytes <= _MAX_BYTES or wish.device_id < 0:
                raise InvalidRequest("failed to register shared memory region: invalid args")
            return None
        name = segment_of(wish.key)
        if wish.offset and not self._traits.takes_offsets:
            raise InvalidRequest(
                f"shared memory region '{wish.name}' begins at offset {wish.offset}; Triton reads such a region at the "
                "wrong place: register the segment from offset 0 on, and give each tensor a shared_memory_offset"
            )
        try:
            segment = self._open_segment(name)
        except OSError as error:
            raise InvalidRequest(f"Unable to open shared memory region: '{wish.key}'") from error
        if not _fits(wish, segment):
            segment.close()
            raise InvalidRequest(f"failed to register shared memory region '{wish.name}': invalid args")
        return segment

    async def _make_room(self, name: str, caller: Caller) -> None:
        """Take back what has that name and is not needed, waiting for requests that still use it."""
        self._check_generation()
        await self._note_gone()
        for region in [*self._registry.own(Kind.SYSTEM, caller), *self._registry.own(Kind.CUDA, caller)]:
            if region.name == name and self._registry.is_orphan(region):
                self._registry.retire(region)
        until = time.monotonic() + DRAIN_S
        while self._registry.is_leaving(name) and time.monotonic() < until:
            await self._take_back_in_turn()
            if self._registry.is_leaving(name):
                await asyncio.sleep(_DRAIN_STEP_S)

    async def _register(self, region: Region) -> None:
        """Where it is not known what became of it, it is taken back."""
        try:
            await engine_calls.register(self._relay, region.wish)
        except InferenceError as error:
            if type(error) in engine_calls.SAID_NO:
                self._registry.forget(region)
            else:
                self._registry.retire(region)
            raise
        except BaseException:
            self._registry.retire(region)
            raise

    async def _unregister(self, region: Region) -> None:
        """Raises BackendFailed in Triton's words where a request uses it."""
        if self._registry.is_used(region, time.monotonic()):
            raise BackendFailed(f"Cannot unregister shared memory region '{region.name}', it is currently in use.")
        await engine_calls.unregister(self._relay, region.kind, region.name)
        if region in self._registry:
            self._registry.forget(region)
            _close(region)

    async def _take_back_in_turn(self) -> None:
        async with self._turn:
            await self._renew()
            await self._take_back()

    async def _take_back(self) -> None:
        """What is due, but for what the engine itself still uses."""
        for region in self._registry.due(time.monotonic()):
            with suppress(BackendFailed):
                await self._unregister(region)

    def _check_generation(self) -> None:
        """Forget the regions of an engine that is gone."""
        if self._known_generation == self._generation():
            return
        for region in self._registry.forget_all():
            self._stale.add((region.kind, region.name))
            _close(region)

    async def _renew(self) -> None:
        """Once for each coming of the engine: what it may still have of former times goes."""
        generation = self._generation()
        if self._known_generation == generation:
            return
        self._check_generation()
        if self._traits.is_ours:
            await engine_calls.unregister_everything(self._relay, is_spared=is_slab_name)
        for kind, name in () if self._traits.is_ours else tuple(self._stale):
            await engine_calls.unregister(self._relay, kind, name)
        self._stale.clear()
        self._known_generation = generation

    async def _note_gone(self) -> None:
        watched = self._registry.connections()
        if watched:
            gone = await asyncio.to_thread(self._find_gone, watched)
            self._registry.disconnect(gone, time.monotonic())


def _fits(wish: SystemWish, segment: Segment) -> bool:
    """Whether the region has bytes, and the segment all of them."""
    return wish.offset >= 0 < wish.size_bytes and wish.offset + wish.size_bytes <= segment.size_bytes()


def _check_segment(region: Region) -> None:
    """Raises InvalidRequest where the segment was cut since it was registered: the engine would die of it."""
    if region.segment is not None and isinstance(region.wish, SystemWish) and not _fits(region.wish, region.segment):
        raise InvalidRequest(
            f"shared memory region '{region.name}' has {region.wish.size_bytes} bytes, but its segment was cut to "
            f"{region.segment.size_bytes()}; unregister it, and register what there is"
        )


def _close(region: Region) -> None:
    if region.segment is not None:
        region.segment.close()
