"""Guests of a gateway: other programs of this host and user that have its core infer, beside its own traffic.

A guest is no front: nobody is served by it, nobody waits for it, and it has no column in what the fronts share. What it
may take is bounded here. The memory that guests are lent comes on top of the gateway's own, so that none of that is
less when they come; none of it is had of the machine before they write there.
"""

from dataclasses import dataclass

MAX_GUESTS = 8
MAX_GUEST_ASKS = 256  # inferences of one guest that the core has at once
GUEST_PARTS = 2  # of the slab; whoever comes later sends every byte until one is free
_OF_A_PART = 4  # of the gateway's own slab: 64 MiB of its 256


@dataclass(frozen=True, slots=True)
class GuestRoom:
    """What of the slab guests may be lent: so many parts of so many bytes."""

    part_bytes: int
    parts: int = GUEST_PARTS


def guest_room(slab_bytes: int) -> GuestRoom:
    """Of a gateway whose own slab has so many bytes."""
    return GuestRoom(slab_bytes // _OF_A_PART)


def with_guest_room(slab_bytes: int) -> int:
    """The size of the memory in which the gateway's own slab and its guests' parts lie."""
    room = guest_room(slab_bytes)
    return slab_bytes + room.parts * room.part_bytes
