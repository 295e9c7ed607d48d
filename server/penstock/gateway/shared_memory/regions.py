"""Regions that clients share with the engine: registered, checked, and unregistered when no longer needed."""

import asyncio
import struct
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from urllib.parse import unquote

from penstock.gateway.shared_memory import engine_calls
from penstock.gateway.shared_memory.registry import RegionRegistry, RegistryLimits
from penstock.logs import get_logger
from penstock.protocol.call import RegionUse
from penstock.protocol.engine import Relay
from penstock.protocol.errors import EngineFailed, InferenceError, InvalidRequest, NotSupported, RegionNotFound
from penstock.protocol.identity import Identity
from penstock.protocol.shared_memory import (
    HANDLE_BYTES,
    CudaRegionSpec,
    OpenSegment,
    Region,
    RegionKind,
    RegionSpec,
    Segment,
    SystemRegionSpec,
    check_region_name,
    is_slab_name,
    kind_of,
    segment_of,
)

SWITCHED_OFF = (
    "shared memory is off, since a client that may name a segment of this machine may read and write it, and may end "
    "the engine by cutting it; send tensors in the request, or start the gateway with --allow-client-shm"
)
SEVERAL_ENGINES = (
    "the engine is several, and a region that is known to one of them is not to the others; send tensors in the request"
)
REMOTE_ENGINE = (
    "the engine is on another host and shares no memory with clients of this one; send tensors in the request"
)


class NoSharedMemory:
    """Replaces SharedMemory where it is off: every call raises NotSupported with the reason."""

    def __init__(self, refusal: str = SWITCHED_OFF) -> None:
        self.refusal = refusal

    async def _refuse(self, *_: object, **__: object) -> None:
        raise NotSupported(self.refusal)

    register = unregister = _refuse

    def status(self, *_: object) -> list[Region]:
        raise NotSupported(self.refusal)

    @contextmanager
    def held(self, uses: Collection[RegionUse], caller: Identity) -> Iterator[None]:
        """Raises NotSupported if regions are used."""
        if self.refusal:
            raise NotSupported(self.refusal)
        yield


TCP_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"


def closed_connections(connections: Collection[str], tables: Collection[Path] = TCP_TABLES) -> set[str]:
    """The connections, such as "ipv4:127.0.0.1:53210", that are not established. Reads files."""
    try:
        text = b"\n".join(table.read_bytes() for table in tables if table.exists())
    except OSError:
        return set()
    if not text:
        return set()
    return {one for one in connections if (rows := _rows_of(one)) and not any(row in text for row in rows)}


def _rows_of(connection: str) -> tuple[bytes, ...]:
    """How /proc/net/tcp lists an established connection: peer address and state. Empty if it is not TCP."""
    scheme, _, rest = connection.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdigit():
        return ()
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ()
    forms = [address.packed]
    if isinstance(address, IPv4Address):
        forms.append(bytes(10) + b"\xff\xff" + address.packed)  # how a listener on [::] lists it
    return tuple(f" {_hexadecimal(form)}:{int(port):04X} {_ESTABLISHED} ".encode() for form in forms)


def _hexadecimal(packed: bytes) -> str:
    """As the kernel prints it: each four bytes in host byte order."""
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed))


SWEEP_S = 1.0
DRAIN_S = 5.0
_DRAIN_STEP_S = 0.05
_MAX_BYTES = 2**63 - 1
log = get_logger("shared_memory")


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """is_ours: used by no other program. takes_offsets: Triton 2.51 adds an offset twice, and overruns its memory."""

    is_ours: bool
    takes_offsets: bool
    has_cuda: bool = True


class SharedMemory:
    """Regions of one engine. For the event loop; `run` must run beside it. generation: changes at each engine start."""

    refusal = ""

    def __init__(
        self,
        relay: Relay,
        traits: EngineTraits,
        *,
        limits: RegistryLimits,
        open_segment: OpenSegment,
        generation: Callable[[], int],
        find_gone: Callable[[Collection[str]], set[str]] = closed_connections,
    ) -> None:
        self._relay = relay
        self._traits = traits
        self._open_segment = open_segment
        self._generation = generation
        self._find_gone = find_gone
        self._registry = RegionRegistry(limits)
        self._known_generation: int | None = None
        self._stale: set[tuple[RegionKind, str]] = set()
        self._turn = asyncio.Lock()

    async def register(self, spec: RegionSpec, caller: Identity) -> None:
        """Registers the region at the engine. Raises InferenceError, with Triton's message where it has one."""
        region = Region(spec, caller, self._checked(spec))
        try:
            await self._make_room(spec.name, caller)
            async with self._turn:
                await self._renew()
                self._registry.claim(region, time.monotonic())
                await self._register(region)
        except BaseException:
            if region not in self._registry:
                _close(region)
            raise

    async def unregister(self, kind: RegionKind, name: str, caller: Identity) -> None:
        """Unregisters the region of this name, if the client may use it; without a name, all that it registered.

        Raises EngineFailed, with Triton's text, if requests use some of them; the others are unregistered.
        """
        self._require(kind)
        if not name:
            await self._unregister_own(kind, caller)
            return
        async with self._turn:
            await self._renew()
            with suppress(RegionNotFound):
                for region in self._registry.status(kind, caller, name):
                    await self._unregister(region)

    async def _unregister_own(self, kind: RegionKind, caller: Identity) -> None:
        await self._note_gone()
        shared: list[str] = []
        async with self._turn:
            await self._renew()
            for region in self._registry.own(kind, caller):
                try:
                    await self._unregister(region)
                except EngineFailed:
                    shared.append(region.name)
        if shared:
            names = "".join(f"{name} ," for name in shared)
            raise EngineFailed(f"Failed to unregister the following {kind} shared memory regions: {names}")

    def status(self, kind: RegionKind, caller: Identity, name: str = "") -> list[Region]:
        """Regions that the client may use, or the named one. Raises RegionNotFound with Triton's message."""
        self._require(kind)
        self._check_generation()
        return self._registry.status(kind, caller, name)

    @contextmanager
    def held(self, uses: Collection[RegionUse], caller: Identity) -> Iterator[None]:
        """Protects the regions while a request uses them. Raises RegionNotFound, InvalidRequest beyond the end."""
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
        """Unregisters expired regions until cancelled."""
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
        for region in self._registry.forget_all():
            _close(region)

    # what metrics read

    def count(self) -> int:
        return len(self._registry)

    def size_bytes(self) -> int:
        return self._registry.size_bytes()

    def lost(self) -> dict[tuple[str, ...], float]:
        """Regions removed without a request of the client, by reason."""
        return {(reason,): count for reason, count in self._registry.lost.items()}

    # inside

    def _require(self, kind: RegionKind) -> None:
        if kind is RegionKind.CUDA and not self._traits.has_cuda:
            raise NotSupported("this engine shares no GPU memory; use system shared memory, or --engine triton")

    def _checked(self, spec: RegionSpec) -> Segment | None:
        """The open segment. Raises InvalidRequest for regions that the engine must not register."""
        self._require(kind_of(spec))
        check_region_name(spec.name)
        if isinstance(spec, CudaRegionSpec):
            if len(spec.raw_handle) != HANDLE_BYTES or not 0 < spec.size_bytes <= _MAX_BYTES or spec.device_id < 0:
                raise InvalidRequest("failed to register shared memory region: invalid args")
            return None
        name = segment_of(spec.key)
        if spec.offset and not self._traits.takes_offsets:
            raise InvalidRequest(
                f"shared memory region '{spec.name}' begins at offset {spec.offset}; Triton reads such a region at the "
                "wrong place: register the segment from offset 0 on, and give each tensor a shared_memory_offset"
            )
        try:
            segment = self._open_segment(name)
        except OSError as error:
            raise InvalidRequest(f"Unable to open shared memory region: '{spec.key}'") from error
        if not _fits(spec, segment):
            segment.close()
            raise InvalidRequest(f"failed to register shared memory region '{spec.name}': invalid args")
        return segment

    async def _make_room(self, name: str, caller: Identity) -> None:
        """Unregisters an unneeded region of this name, after the requests that still use it."""
        self._check_generation()
        await self._note_gone()
        for region in [*self._registry.own(RegionKind.SYSTEM, caller), *self._registry.own(RegionKind.CUDA, caller)]:
            if region.name == name and self._registry.is_orphan(region):
                self._registry.retire(region)
        until = time.monotonic() + DRAIN_S
        while self._registry.is_leaving(name) and time.monotonic() < until:
            async with self._turn:
                await self._renew()
                await self._take_back()
            if self._registry.is_leaving(name):
                await asyncio.sleep(_DRAIN_STEP_S)

    async def _register(self, region: Region) -> None:
        """If the result is unknown, the region is unregistered again."""
        try:
            await engine_calls.register(self._relay, region.wish)
        except InferenceError as error:
            if type(error) in engine_calls.ENGINE_REJECTIONS:
                self._registry.forget(region)
            else:
                self._registry.retire(region)
            raise
        except BaseException:
            self._registry.retire(region)
            raise

    async def _unregister(self, region: Region) -> None:
        """Raises EngineFailed with Triton's message while a request uses it."""
        if self._registry.is_used(region, time.monotonic()):
            raise EngineFailed(f"Cannot unregister shared memory region '{region.name}', it is currently in use.")
        await engine_calls.unregister(self._relay, region.kind, region.name)
        if region in self._registry:
            self._registry.forget(region)
            _close(region)

    async def _take_back(self) -> None:
        """Unregisters expired regions that the engine does not use."""
        for region in self._registry.due(time.monotonic()):
            with suppress(EngineFailed):
                await self._unregister(region)

    def _check_generation(self) -> None:
        """Forgets all regions if the engine was restarted."""
        if self._known_generation == self._generation():
            return
        for region in self._registry.forget_all():
            self._stale.add((region.kind, region.name))
            _close(region)

    async def _renew(self) -> None:
        """Once per engine start: unregisters regions that remained from earlier."""
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


def _fits(spec: SystemRegionSpec, segment: Segment) -> bool:
    """Whether the region is not empty and lies inside the segment."""
    return spec.offset >= 0 < spec.size_bytes and spec.offset + spec.size_bytes <= segment.size_bytes()


def _check_segment(region: Region) -> None:
    """Raises InvalidRequest if the segment was truncated since registration, which would crash the engine."""
    if (
        region.segment is not None
        and isinstance(region.wish, SystemRegionSpec)
        and not _fits(region.wish, region.segment)
    ):
        raise InvalidRequest(
            f"shared memory region '{region.name}' has {region.wish.size_bytes} bytes, but its segment was cut to "
            f"{region.segment.size_bytes()}; unregister it, and register what there is"
        )


def _close(region: Region) -> None:
    if region.segment is not None:
        region.segment.close()
