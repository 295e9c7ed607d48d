"""Which client registered which region, who may use it, and when it expires. Sans-IO: `now` in monotonic seconds."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from penstock.network import is_loopback
from penstock.protocol.call import RegionUse
from penstock.protocol.errors import InvalidRequest, Overloaded, QuotaExceeded, RegionNotFound, RegionTaken
from penstock.protocol.identity import Identity
from penstock.protocol.shared_memory import Region, RegionKind

ORPHAN_S = 5.0
LINGER_S = 2.0


class RegionLoss(StrEnum):
    """Why a region was removed without a request: its lease expired, or its owner's connection closed."""

    LEASE = "lease"
    CONNECTION = "connection"


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """lease_s: lifetime of an unused region. max_regions_of_one: limit per owner."""

    lease_s: float = 3600.0
    max_regions: int = 4096
    max_regions_of_one: int = 1024


@dataclass(slots=True)
class _RegionEntry:
    """busy_until: an abandoned request may access it. is_orphan: its owner left. is_leaving: no new requests."""

    region: Region
    expires_at: float
    uses: int = 0
    busy_until: float = 0.0
    is_orphan: bool = False
    is_leaving: bool = False

    def is_idle(self, now: float) -> bool:
        return not self.uses and now >= self.busy_until


class RegionRegistry:
    """The regions of one engine, in one namespace. Regions in use are never returned for removal."""

    def __init__(self, limits: RegistryLimits) -> None:
        self._limits = limits
        self._entries: dict[str, _RegionEntry] = {}
        self.lost = dict.fromkeys(RegionLoss, 0)

    def claim(self, region: Region, now: float) -> None:
        """Adds the region. Raises RegionTaken with Triton's message, QuotaExceeded, Overloaded."""
        if region.name in self._entries:
            raise RegionTaken(f"shared memory region '{region.name}' already in manager")
        owned = sum(entry.region.owner.owner == region.owner.owner for entry in self._entries.values())
        if owned >= self._limits.max_regions_of_one:
            raise QuotaExceeded(f"this client has {owned} shared memory regions; unregister some before the next")
        if len(self._entries) >= self._limits.max_regions:
            raise Overloaded(
                f"{len(self._entries)} shared memory regions are registered, as many as this gateway keeps"
            )
        self._entries[region.name] = _RegionEntry(region, now + self._limits.lease_s)

    def find(self, use: RegionUse, caller: Identity) -> Region:
        """The region that a request names. Raises RegionNotFound, or InvalidRequest beyond its end, as Triton does."""
        entry = self._entries.get(use.name)
        if entry is None or entry.is_leaving or not may_use(caller, entry.region.owner):
            raise RegionNotFound(f"Unable to find shared memory region: '{use.name}'")
        size_bytes = entry.region.wish.size_bytes
        if not 0 <= use.offset < size_bytes:
            raise InvalidRequest(f"Invalid offset for shared memory region: '{use.name}'")
        if use.size_bytes is not None and not 0 < use.size_bytes <= size_bytes - use.offset:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{use.name}'")
        return entry.region

    def enter(self, names: Collection[str], now: float) -> None:
        """Begins a request that uses these regions, and renews their leases."""
        for name in names:
            entry = self._entries[name]
            entry.uses += 1
            entry.expires_at = now + self._limits.lease_s

    def leave(self, regions: Collection[Region], now: float, *, is_answered: bool) -> None:
        """Ends a request. If it was not answered, the engine may still access the regions."""
        for region in regions:
            entry = self._entries.get(region.name)
            if entry is None or entry.region is not region:  # the engine was restarted meanwhile
                continue
            entry.uses -= 1
            if not is_answered:
                entry.busy_until = now + LINGER_S

    def status(self, kind: RegionKind, caller: Identity, name: str = "") -> list[Region]:
        """Regions that the client may use, by name, or the named one. Raises RegionNotFound with Triton's message."""
        found = self._which(kind, lambda entry: not entry.is_leaving and may_use(caller, entry.region.owner))
        if not name:
            return sorted(found, key=lambda region: region.name)
        named = [region for region in found if region.name == name]
        if not named:
            raise RegionNotFound(f"Unable to find {kind} shared memory region: '{name}'")
        return named

    def own(self, kind: RegionKind, caller: Identity) -> list[Region]:
        """Regions that unregister-all removes: the client's own, and those of its closed connections."""
        return self._which(kind, lambda entry: _is_own(caller, entry))

    def retire(self, region: Region) -> None:
        """Stops new requests from using it; `due` returns it when it is idle."""
        if region in self:  # the engine may have restarted meanwhile
            self._entries[region.name].is_leaving = True

    def due(self, now: float) -> list[Region]:
        """Idle regions to unregister now and then forget: retired, or with an expired lease."""
        for entry in self._entries.values():
            if not entry.is_leaving and now >= entry.expires_at and entry.is_idle(now):
                entry.is_leaving = True
                self.lost[RegionLoss.CONNECTION if entry.is_orphan else RegionLoss.LEASE] += 1
        return [entry.region for entry in self._entries.values() if entry.is_leaving and entry.is_idle(now)]

    def forget(self, region: Region) -> None:
        """Removes the region after it was unregistered."""
        entry = self._entries.get(region.name)
        if entry is not None and entry.region is region:
            del self._entries[region.name]

    def forget_all(self) -> list[Region]:
        """Removes and returns all regions, because the engine restarted."""
        regions = [entry.region for entry in self._entries.values()]
        self._entries.clear()
        return regions

    def connections(self) -> set[str]:
        """Connections that own regions."""
        return {
            entry.region.owner.connection
            for entry in self._entries.values()
            if entry.region.owner.connection and not entry.region.owner.key_name and not entry.is_orphan
        }

    def disconnect(self, gone: Collection[str], now: float) -> None:
        """Marks regions of closed connections: they expire in ORPHAN_S unless a client of that address uses them."""
        for entry in self._entries.values():
            owner = entry.region.owner
            if owner.connection in gone and not owner.key_name and not entry.is_orphan:
                entry.is_orphan = True
                entry.expires_at = min(entry.expires_at, now + ORPHAN_S)

    def size_bytes(self) -> int:
        return sum(entry.region.wish.size_bytes for entry in self._entries.values())

    def is_used(self, region: Region, now: float) -> bool:
        return region in self and not self._entries[region.name].is_idle(now)

    def is_orphan(self, region: Region) -> bool:
        """Whether its owner's connection is closed."""
        return self._entries[region.name].is_orphan

    def is_leaving(self, name: str) -> bool:
        """Whether a region of that name was retired and waits for removal."""
        entry = self._entries.get(name)
        return entry is not None and entry.is_leaving

    def __contains__(self, region: Region) -> bool:
        entry = self._entries.get(region.name)
        return entry is not None and entry.region is region

    def __len__(self) -> int:
        return len(self._entries)

    def _which(self, kind: RegionKind, is_meant: Callable[[_RegionEntry], bool]) -> list[Region]:
        entries: Iterable[_RegionEntry] = self._entries.values()
        return [entry.region for entry in entries if entry.region.kind is kind and is_meant(entry)]


def may_use(caller: Identity, owner: Identity) -> bool:
    """Whether the client has the owner's key, or both are anonymous and at the same address (loopback is one)."""
    if caller.key_name or owner.key_name:
        return caller.key_name == owner.key_name
    return _host_of(caller.address) == _host_of(owner.address)


def _is_own(caller: Identity, entry: _RegionEntry) -> bool:
    owner = entry.region.owner
    if not may_use(caller, owner):
        return False
    return entry.is_orphan or caller.key_name != "" or caller.connection == owner.connection


def _host_of(address: str) -> str:
    host = address.removeprefix("::ffff:")
    return "loopback" if is_loopback(host) else host
