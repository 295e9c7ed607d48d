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
    """A POSIX shared-memory segment, held open: it is the same one though its name may be gone or another's."""

    def size_bytes(self) -> int:
        """As large as it is now: its owner may cut it at any time."""
        ...

    def close(self) -> None: ...


OpenSegment = Callable[[str], Segment]
"""Opens the segment of that name in /dev/shm. Raises OSError."""


@dataclass(frozen=True, slots=True)
class SystemRegionSpec:
    """What a client wants to register: size_bytes of the segment `key`, from offset on."""

    name: str
    key: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CudaRegionSpec:
    """What a client wants to register: GPU memory that it exported, by its cudaIpcMemHandle_t."""

    name: str
    raw_handle: bytes
    device_id: int
    size_bytes: int


RegionSpec = SystemRegionSpec | CudaRegionSpec


def kind_of(wish: RegionSpec) -> RegionKind:
    """By its class."""
    return RegionKind.SYSTEM if isinstance(wish, SystemRegionSpec) else RegionKind.CUDA


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region. owner: who registered it."""

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
# Of the engine's models (backends/reaper.region_prefix, Triton's own names for its stubs' regions), of semaphores.
_RESERVED = re.compile(r"penstock_|triton_\w+_backend_|sem\.")

# What a gateway's own memory is called (local/slab_memory), as a segment and as a region.
_SLAB = re.compile(r"penstock_[0-9a-f]{12}_slab")


def is_slab_name(name: str) -> bool:
    """Whether a region of that name is a gateway's own memory."""
    return _SLAB.fullmatch(name) is not None


def check_region_name(name: str) -> None:
    """Raises InvalidRequest for a name that is empty, long, no plain text, looks like a path, or is the gateway's."""
    _check_name(name, "a shared memory region's name")
    if is_slab_name(name):
        raise InvalidRequest(f"a shared memory region's name is {_quoted(name)}, which is the gateway's; take another")


def segment_of(key: str) -> str:
    """The file's name in /dev/shm that the key stands for: without the slash that it may begin with.

    Raises InvalidRequest for a key that leads elsewhere, and for the segments of the engine and of the gateway: who
    writes to those owns the engine.
    """
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


SLAB_FROM_BYTES = 32 << 10  # a tensor below this is sent: naming its place costs more than the copies


class Lease(Protocol):
    """Bytes of the slab that stay allocated until the last reference is released."""

    @property
    def place(self) -> SlabAddress:
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
        """Adds a reference, which needs one more release."""
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
        """A lease of so many bytes with one reference; None if there is no room."""
        ...

    def lease_of(self, place: SlabAddress) -> Lease | None:
        """The lease at that address; None if it is gone, or the address is of an earlier generation."""
        ...

    def window(self, place: SlabAddress, size_bytes: int) -> memoryview:
        """The bytes at that address, over any number of leases; adds a reference to each."""
        ...
