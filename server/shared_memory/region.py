"""A region of memory that a client shares with the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from server.core.caller import Caller

HANDLE_BYTES = 64


class Kind(StrEnum):
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
class SystemWish:
    """What a client wants to register: size_bytes of the segment `key`, from offset on."""

    name: str
    key: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CudaWish:
    """What a client wants to register: GPU memory that it exported, by its cudaIpcMemHandle_t."""

    name: str
    raw_handle: bytes
    device_id: int
    size_bytes: int


Wish = SystemWish | CudaWish


def kind_of(wish: Wish) -> Kind:
    """By its class."""
    return Kind.SYSTEM if isinstance(wish, SystemWish) else Kind.CUDA


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region. owner: who registered it."""

    wish: Wish
    owner: Caller
    segment: Segment | None = None

    @property
    def name(self) -> str:
        return self.wish.name

    @property
    def kind(self) -> Kind:
        return kind_of(self.wish)
