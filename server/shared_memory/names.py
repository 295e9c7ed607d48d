"""What a region may be called, and which segments of this machine it may be."""

import re

from server.core.errors import InvalidRequest

MAX_NAME_BYTES = 255
_SHOWN_CHARACTERS = 80
# Of the engine's models (backends/reaper.region_prefix, Triton's own names for its stubs' regions), of semaphores.
_RESERVED = re.compile(r"penstock_|triton_\w+_backend_|sem\.")

# What a gateway's own memory is called (local/slab_memory), as a segment and as a region.
_SLAB = re.compile(r"penstock_[0-9a-f]{12}_slab")


def is_slab_name(name: str) -> bool:
    """Whether a region of that name is a gateway's own memory."""
    return _SLAB.fullmatch(name) is not None


def check_region_name(name: str) -> None:
    """Raises InvalidRequest for a name that is empty, long, no plain text, looks like a path, or is the gateway's."""
    _check(name, "a shared memory region's name")
    if is_slab_name(name):
        raise InvalidRequest(f"a shared memory region's name is {_shown(name)}, which is the gateway's; take another")


def segment_of(key: str) -> str:
    """The file's name in /dev/shm that the key stands for: without the slash that it may begin with.

    Raises InvalidRequest for a key that leads elsewhere, and for the segments of the engine and of the gateway: who
    writes to those owns the engine.
    """
    name = key.lstrip("/")
    _check(name, "a shared memory key")
    if _RESERVED.match(name):
        raise InvalidRequest(
            f"the shared memory key {_shown(key)} belongs to the engine; name a segment of your own, "
            "which begins neither with penstock_ nor with triton_python_backend_ or sem."
        )
    return name


def _check(name: str, what: str) -> None:
    size = len(name.encode("utf-8", "surrogateescape"))
    if not 0 < size <= MAX_NAME_BYTES:
        raise InvalidRequest(f"{what} has {size} bytes; it takes 1 to {MAX_NAME_BYTES}")
    if "/" in name or ".." in name or name == "." or not name.isprintable():
        raise InvalidRequest(f"{what} is {_shown(name)}; it takes no '/', no '..' and no control characters")


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "…")
