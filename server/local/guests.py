"""Guests of a gateway: other programs of this host and user that have its core infer, beside its own traffic.

A guest is no front: nobody is served by it, nobody waits for it, and it has no column in what the fronts share. What it
may take is bounded here; besides, its inferences are let in and counted as a gRPC client's are (guest_calls). The
memory that guests are lent comes on top of the gateway's own, so that none of that is less when they come; none of it
is had of the machine before they write there.
"""

from dataclasses import dataclass

MAX_GUESTS = 8
MAX_GUEST_ASKS = 256  # inferences of one guest that the core has at once
MAX_DEADLINE_S = 24 * 3600.0  # one further away is none, as over gRPC
MAX_NAME = 64  # characters that are kept of what a guest calls itself
GREETING_BYTES = 4096  # of the record in which somebody says who it is
GREETING_S = 5.0  # until then
MAX_GUEST_RECORD_BYTES = 128 << 20  # of a guest without a part of the slab: a 4K picture in floats has 95 MiB
GUEST_UNREAD_BYTES = 64 << 20  # of answers that a guest has not read: beyond, what it asks is refused
GUEST_DEAF_BYTES = GUEST_UNREAD_BYTES + (4 << 20)  # and when it does not read the refusals either, it is served no more
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
