"""Who owns, uses and loses which region: the rules, over a clock that stands still."""

import pytest

from penstock.gateway.shared_memory.registry import (
    LINGER_S,
    ORPHAN_S,
    RegionLoss,
    RegionRegistry,
    RegistryLimits,
    may_use,
)
from penstock.protocol.call import RegionUse
from penstock.protocol.errors import InvalidRequest, Overloaded, QuotaExceeded, RegionNotFound, RegionTaken
from penstock.protocol.identity import Identity
from penstock.protocol.shared_memory import Region, RegionKind, SystemRegionSpec

ALICE, BOB = Identity("alice", address="127.0.0.1"), Identity("bob", address="127.0.0.1")
HERE = Identity(address="127.0.0.1")
OVER_GRPC = Identity(connection="ipv4:127.0.0.1:4000", address="127.0.0.1")
OTHER_GRPC = Identity(connection="ipv4:127.0.0.1:4001", address="127.0.0.1")
ALICE_OVER_GRPC = Identity("alice", connection="ipv4:127.0.0.1:4002", address="127.0.0.1")
ELSEWHERE = Identity(address="192.0.2.7")
LEASE_S = 100.0


def registry(**limits: int) -> RegionRegistry:
    return RegionRegistry(RegistryLimits(lease_s=LEASE_S, **limits))


def claim(regions: RegionRegistry, name: str, owner: Identity, now: float = 0.0) -> Region:
    region = Region(SystemRegionSpec(name, f"/{name}", 0, 64), owner)
    regions.claim(region, now)
    return region


@pytest.mark.parametrize(
    ("caller", "owner", "is_allowed"),
    [
        (ALICE, ALICE_OVER_GRPC, True),
        (ALICE, BOB, False),
        (HERE, ALICE, False),
        (ALICE, HERE, False),
        (OVER_GRPC, OTHER_GRPC, True),
        (HERE, OVER_GRPC, True),
        (Identity(address="::1"), HERE, True),
        (Identity(address="::ffff:127.0.0.1"), HERE, True),
        (Identity(address="::ffff:192.0.2.7"), ELSEWHERE, True),
        (ELSEWHERE, HERE, False),
    ],
)
def test_region_is_used_by_the_same_key_else_from_the_same_address(
    caller: Identity, owner: Identity, is_allowed: bool
) -> None:
    """Clients open several connections, and use both protocols; a key is separate from all others."""
    assert may_use(caller, owner) is is_allowed


def test_region_of_another_owner_is_unknown_in_tritons_words() -> None:
    """Neither found nor listed; its name is taken all the same."""
    regions = registry()
    claim(regions, "r", ALICE)
    with pytest.raises(RegionNotFound, match=r"^Unable to find shared memory region: 'r'$"):
        regions.find(RegionUse("r", 0, 8), BOB)
    with pytest.raises(RegionNotFound, match=r"^Unable to find system shared memory region: 'r'$"):
        regions.status(RegionKind.SYSTEM, BOB, "r")
    assert regions.status(RegionKind.SYSTEM, BOB) == []
    with pytest.raises(RegionTaken, match=r"^shared memory region 'r' already in manager$"):
        claim(regions, "r", BOB)


def test_own_regions_are_a_connections_not_its_neighbours() -> None:
    """Unregister-all of one connection leaves those of the others, and of HTTP; a key's are its own wherever from."""
    regions = registry()
    for name, owner in (("mine", OVER_GRPC), ("next", OTHER_GRPC), ("http", HERE), ("alice", ALICE)):
        claim(regions, name, owner)
    assert [region.name for region in regions.own(RegionKind.SYSTEM, OVER_GRPC)] == ["mine"]
    assert [region.name for region in regions.own(RegionKind.SYSTEM, HERE)] == ["http"]
    assert [region.name for region in regions.own(RegionKind.SYSTEM, ALICE_OVER_GRPC)] == ["alice"]
    assert regions.own(RegionKind.CUDA, OVER_GRPC) == []


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (RegionUse("r", 64, 1), "Invalid offset for"),
        (RegionUse("r", -1, 8), "Invalid offset for"),
        (RegionUse("r", 2**64 - 8, 8), "Invalid offset for"),
        (RegionUse("r", 60, 8), "Invalid offset \\+ byte size for"),
        (RegionUse("r", 0, 65), "Invalid offset \\+ byte size for"),
        (RegionUse("r", 0, 0), "Invalid offset \\+ byte size for"),
        (RegionUse("r", 16, -1), "Invalid offset \\+ byte size for"),
        (RegionUse("r", 16, 2**64 - 1), "Invalid offset \\+ byte size for"),
    ],
)
def test_part_beyond_its_region_is_refused_in_tritons_words(use: RegionUse, words: str) -> None:
    """The last two, whose sum wraps around 2^64, end Triton 2.51."""
    regions = registry()
    claim(regions, "r", HERE)
    with pytest.raises(InvalidRequest, match=words):
        regions.find(use, HERE)


def test_part_to_the_last_byte_is_found() -> None:
    """A region ends where it ends, not a byte earlier; a size that is not given is the engine's to miss."""
    regions = registry()
    region = claim(regions, "r", HERE)
    assert regions.find(RegionUse("r", 56, 8), HERE) is region
    assert regions.find(RegionUse("r", 0, None), HERE) is region


def test_unused_region_goes_with_its_lease() -> None:
    """Use renews it; what went is counted."""
    regions = registry()
    region = claim(regions, "r", HERE)
    regions.enter(["r"], 90.0)
    regions.leave([region], 91.0, is_answered=True)
    assert regions.due(189.0) == []
    assert regions.due(190.0) == [region]
    with pytest.raises(RegionNotFound):
        regions.find(RegionUse("r", 0, 8), HERE)
    regions.forget(region)
    assert regions.due(190.0) == []
    assert regions.lost == {RegionLoss.LEASE: 1, RegionLoss.CONNECTION: 0}
    assert len(regions) == 0


def test_region_in_use_is_never_due() -> None:
    """Neither by its lease nor by being retired."""
    regions = registry()
    region = claim(regions, "r", HERE)
    regions.enter(["r"], 0.0)
    assert regions.due(LEASE_S * 2) == []
    regions.retire(region)
    assert regions.due(LEASE_S * 2) == []
    assert regions.is_leaving("r")
    assert regions.is_used(region, LEASE_S * 2)
    regions.leave([region], LEASE_S * 2, is_answered=True)
    assert regions.due(LEASE_S * 2) == [region]


def test_region_of_a_request_given_up_lingers() -> None:
    """What runs in a thread ends later than its caller."""
    regions = registry()
    region = claim(regions, "r", HERE)
    regions.enter(["r"], 0.0)
    regions.leave([region], 1.0, is_answered=False)
    regions.retire(region)
    assert regions.due(LINGER_S) == []
    assert not regions.is_used(region, 1.0 + LINGER_S)
    assert regions.due(1.0 + LINGER_S) == [region]


def test_region_of_a_gone_connection_goes_at_once_unless_it_is_used() -> None:
    """A client that comes back over another connection, and uses it, keeps it; and may clear it away."""
    regions = registry()
    used, left = claim(regions, "used", OVER_GRPC), claim(regions, "left", OVER_GRPC)
    assert regions.connections() == {OVER_GRPC.connection}
    regions.disconnect({OVER_GRPC.connection}, 10.0)
    assert regions.connections() == set()
    regions.enter(["used"], 11.0)
    regions.leave([used], 11.0, is_answered=True)
    assert {region.name for region in regions.own(RegionKind.SYSTEM, OTHER_GRPC)} == {"used", "left"}
    assert regions.due(10.0 + ORPHAN_S) == [left]
    assert regions.lost[RegionLoss.CONNECTION] == 1


def test_region_of_a_key_outlives_its_connection() -> None:
    """Who has a key is known again; only the lease counts."""
    regions = registry()
    claim(regions, "r", ALICE_OVER_GRPC)
    assert regions.connections() == set()
    regions.disconnect({ALICE_OVER_GRPC.connection}, 0.0)
    assert regions.due(ORPHAN_S) == []


def test_regions_are_bounded_for_one_and_for_all() -> None:
    """One client cannot take what all may have."""
    regions = registry(max_regions=3, max_regions_of_one=2)
    claim(regions, "a", ALICE)
    claim(regions, "b", ALICE)
    with pytest.raises(QuotaExceeded, match="has 2 shared memory regions"):
        claim(regions, "c", ALICE)
    claim(regions, "c", BOB)
    with pytest.raises(Overloaded, match="3 shared memory regions are registered"):
        claim(regions, "d", HERE)


def test_regions_of_a_restarted_engine_are_forgotten() -> None:
    """A request that began before ends without touching the new ones of the same name."""
    regions = registry()
    old = claim(regions, "r", HERE)
    regions.enter(["r"], 0.0)
    assert regions.forget_all() == [old]
    new = claim(regions, "r", HERE)
    regions.leave([old], 1.0, is_answered=False)
    regions.retire(new)
    assert regions.due(1.0) == [new]
