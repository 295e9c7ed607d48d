"""Shared memory: regions that clients register, their names, and the interface of the gateway's own slab."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.identity import Identity
from penstock.protocol.inference import SlabAddress

HANDLE_BYTES = 64


class RegionKind(StrEnum):
    """Where the memory is: of this machine, or of a GPU."""

    SYSTEM = "system"
    CUDA = "cuda"


class Segment(Protocol):
    """An open POSIX shared-memory segment, independent of its name."""

    def size_bytes(self) -> int:
        """The current size: its owner may truncate it at any time."""
        ...

    def close(self) -> None: ...


OpenSegment = Callable[[str], Segment]
"""Opens the segment of that name in /dev/shm. Raises OSError."""


@dataclass(frozen=True, slots=True)
class SystemRegionSpec:
    """Region to register: size_bytes of the segment `key`, from offset on."""

    name: str
    key: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CudaRegionSpec:
    """Region to register: GPU memory that the client exported, by its cudaIpcMemHandle_t."""

    name: str
    raw_handle: bytes
    device_id: int
    size_bytes: int


RegionSpec = SystemRegionSpec | CudaRegionSpec


def kind_of(wish: RegionSpec) -> RegionKind:
    """The kind of the region."""
    return RegionKind.SYSTEM if isinstance(wish, SystemRegionSpec) else RegionKind.CUDA


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region. owner: the client that registered it."""

    wish: RegionSpec
    owner: Identity
    segment: Segment | None = None

    @property
    def name(self) -> str:
        return self.wish.name

    @property
    def kind(self) -> RegionKind:
        return kind_of(self.wish)


MAX_NAME_BYTES = 255
_QUOTED_CHARACTERS = 80
# Names of the engine's models' regions (engines/triton, Triton's own), and of semaphores.
_RESERVED = re.compile(r"penstock_|triton_\w+_backend_|sem\.")

# The gateway's own slab, as a segment and as a region (gateway/workers/slab.py).
_SLAB = re.compile(r"penstock_[0-9a-f]{12}_slab")


def is_slab_name(name: str) -> bool:
    """Whether a region of this name is a gateway's own slab."""
    return _SLAB.fullmatch(name) is not None


def check_region_name(name: str) -> None:
    """Raises InvalidRequest for a name that is empty, too long, not plain text, path-like, or a gateway's slab."""
    _check_name(name, "a shared memory region's name")
    if is_slab_name(name):
        raise InvalidRequest(f"a shared memory region's name is {_quoted(name)}, which is the gateway's; take another")


def segment_of(key: str) -> str:
    """File name in /dev/shm of the key. Raises InvalidRequest for a path, and for the engine's own segments."""
    name = key.lstrip("/")
    _check_name(name, "a shared memory key")
    if _RESERVED.match(name):
        raise InvalidRequest(
            f"the shared memory key {_quoted(key)} belongs to the engine; name a segment of your own, "
            "which begins neither with penstock_ nor with triton_python_backend_ or sem."
        )
    return name


def _check_name(name: str, what: str) -> None:
    size = len(name.encode("utf-8", "surrogateescape"))
    if not 0 < size <= MAX_NAME_BYTES:
        raise InvalidRequest(f"{what} has {size} bytes; it takes 1 to {MAX_NAME_BYTES}")
    if "/" in name or ".." in name or name == "." or not name.isprintable():
        raise InvalidRequest(f"{what} is {_quoted(name)}; it takes no '/', no '..' and no control characters")


def _quoted(name: str) -> str:
    return repr(name if len(name) <= _QUOTED_CHARACTERS else name[:_QUOTED_CHARACTERS] + "…")


SLAB_FROM_BYTES = 32 << 10  # smaller tensors are sent, which is cheaper than an address


class Lease(Protocol):
    """Bytes of the slab that stay allocated until the last reference is released."""

    @property
    def place(self) -> SlabAddress:
        """Their address for an engine that uses the slab."""
        ...

    @property
    def view(self) -> memoryview:
        """The bytes, writable."""
        ...

    @property
    def descriptor(self) -> int:
        """Descriptor of the file with the bytes at place.offset, for a child process to map."""
        ...

    def hold(self) -> None:
        """Adds a reference, which needs one more release."""
        ...

    def release(self) -> None:
        """Removes a reference. After the last one, the bytes may be leased again."""
        ...

    def release_later(self) -> None:
        """The same after a delay: the engine of an abandoned call may still read the bytes."""
        ...


class Slab(Protocol):
    """A bounded memory that is handed out in leases. Never blocks."""

    def lease(self, size_bytes: int) -> Lease | None:
        """A lease of this size with one reference; None if there is no room."""
        ...

    def lease_of(self, place: SlabAddress) -> Lease | None:
        """The lease at this address; None if it is gone, or the address is of an earlier generation."""
        ...

    def reference(self, place: SlabAddress, size_bytes: int) -> bytes | None:
        """What a model's process reads these bytes by, instead of a copy; None if it cannot."""
        ...

    def unpublish(self) -> None:
        """Makes no more references."""
        ...

    def window(self, place: SlabAddress, size_bytes: int) -> memoryview:
        """The bytes at this address, over any number of leases. Raises ValueError for an earlier generation."""
        ...
