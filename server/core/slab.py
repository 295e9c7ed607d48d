"""The seam to memory shared on this host: decoders and fronts write into it, an engine reads from it."""

from typing import Protocol

from server.core.tensor import Place

SLAB_FROM_BYTES = 32 << 10  # a tensor below this is sent: naming its place costs more than the copies


class Lease(Protocol):
    """Bytes of the slab that are somebody's until the last hold on them is let go."""

    @property
    def place(self) -> Place:
        """Where an engine that knows the slab finds them."""
        ...

    @property
    def view(self) -> memoryview:
        """The bytes, writable."""
        ...

    @property
    def descriptor(self) -> int:
        """Of the file that they lie in, at place.offset: for a child process that is to map it."""
        ...

    def hold(self) -> None:
        """One more release is owed; whoever still reads the bytes holds them."""
        ...

    def release(self) -> None:
        """Give a hold back. After the last one the bytes are another's."""
        ...

    def release_later(self) -> None:
        """The same a moment later: for a call that was given up, whose engine may read the bytes still."""
        ...


class Slab(Protocol):
    """A bounded piece of memory that is handed out in leases. Nothing here waits."""

    def lease(self, size_bytes: int) -> Lease | None:
        """Room for so many bytes, held once; None where there is none now."""
        ...

    def lease_of(self, place: Place) -> Lease | None:
        """The lease that lies there; None where it is gone, or the place is of an earlier generation."""
        ...

    def window(self, place: Place, size_bytes: int) -> memoryview:
        """The bytes from there on, over however many leases; whoever asks holds them all."""
        ...
