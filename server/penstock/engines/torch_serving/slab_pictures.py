"""Pictures in the gateway's shared memory: a batch has references, and the model's process reads the pictures there.

Also used by the gateway; it is here, because Triton's model process has no other package of penstock.
"""

import mmap
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .parameters import TorchRequestError

FILE_VARIABLE = "PENSTOCK_SLAB_FILE"  # by which the model process gets the file's path
FILE_NAME = "slab-of-pictures"  # in the stack's run directory
UNREADABLE = "the gateway's shared memory cannot be read"
_MARK = b"penstock-slab\0"  # begins no picture
_TOKEN_BYTES = 16
_REFERENCE = struct.Struct(f"<{len(_MARK)}s{_TOKEN_BYTES}sQQ")


class SlabUnreadable(Exception):
    """A reference to memory that this process cannot read. The gateway then sends the pictures themselves.

    The text has no path, because a client can cause this error with bytes that look like a reference.
    """


@dataclass(frozen=True)
class PublishedSlab:
    """Memory that models' processes of this user can read. descriptor: of this process."""

    descriptor: int
    size_bytes: int
    token: bytes = field(default_factory=lambda: secrets.token_bytes(_TOKEN_BYTES))

    @property
    def line(self) -> str:
        found = os.fstat(self.descriptor)  # a descriptor's number is used again: the inode's is checked, too
        numbers = os.getpid(), self.descriptor, found.st_dev, found.st_ino, self.size_bytes
        return f"{' '.join(map(str, numbers))} {self.token.hex()}"


def publish_slabs(file: Path, slabs: Sequence[PublishedSlab]) -> None:
    """Replaces the file with one that names these. Raises OSError."""
    staged = file.with_name(f"{file.name}.new")
    staged.unlink(missing_ok=True)
    with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
        written.write("\n".join(slab.line for slab in slabs))
    staged.replace(file)


def slab_reference(token: bytes, offset: int, size_bytes: int) -> bytes:
    """To a picture at this offset. Only with the published token, which no client knows, is it read as one."""
    return _REFERENCE.pack(_MARK, token, offset, size_bytes)


class SlabReader:
    """Reads references in the model's process. Maps the memory at its first reference."""

    def __init__(self, file: str | None) -> None:
        """file: the published one's path; None if the engine's gateway publishes none."""
        self._file = file
        self._memories: dict[bytes, memoryview] = {}  # by token: the present one, and the one before it

    def picture(self, element: bytes) -> bytes:
        """The picture that a reference names, copied; any other element unchanged. Raises SlabUnreadable."""
        if self._file is None or len(element) != _REFERENCE.size or not element.startswith(_MARK):
            return element
        _, token, offset, size_bytes = _REFERENCE.unpack(element)
        memory = self._memories.get(token) or self._mapped(token)
        if memory is None:  # forged: it will be rejected, because it is no picture
            return element
        if offset + size_bytes > len(memory):
            raise SlabUnreadable(f"{UNREADABLE}: {size_bytes} bytes at {offset} are beyond its {len(memory)}")
        return bytes(memory[offset : offset + size_bytes])

    def _mapped(self, token: bytes) -> memoryview | None:
        """The published memory with this token; None if there is none."""
        try:
            lines = [line.rpartition(" ") for line in Path(self._file or "").read_text().splitlines()]
            found = next((numbers for numbers, _, published in lines if bytes.fromhex(published) == token), None)
            if found is None:
                return None
            mapped = _map(*map(int, found.split()))
        except OSError as error:
            raise SlabUnreadable(f"{UNREADABLE}: {error.strerror or error}") from error
        except (ValueError, TypeError) as error:
            raise SlabUnreadable(f"{UNREADABLE}: what is published of it is malformed") from error
        newest = list(self._memories.items())[-1:]
        self._memories = dict([*newest, (token, memoryview(mapped))])
        return self._memories[token]


def _map(process_id: int, descriptor: int, device: int, inode: int, size_bytes: int) -> mmap.mmap:
    """Raises OSError, also if the descriptor is another file's by now."""
    opened = os.open(f"/proc/{process_id}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(opened)
        if (found.st_dev, found.st_ino) != (device, inode):
            raise OSError("the gateway has closed it")
        return mmap.mmap(opened, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(opened)


def readable_answered(
    requests: Sequence[Any],
    read: Callable[[Any], Any],
    answer: Callable[[list[Any]], list[Any]],
    refuse: Callable[[SlabUnreadable | TorchRequestError], Any],
) -> list[Any]:
    """One response per request, in order. One that cannot be read is refused, and the others are answered.

    read: may raise SlabUnreadable, TorchRequestError. answer: responses for what was read. refuse: for an error.
    """
    found: list[tuple[Any, SlabUnreadable | TorchRequestError | None]] = []
    for request in requests:
        try:
            found.append((read(request), None))
        except (SlabUnreadable, TorchRequestError) as error:
            found.append((None, error))
    asked = [one for one, error in found if error is None]
    responses = iter(answer(asked) if asked else [])
    return [next(responses) if error is None else refuse(error) for _, error in found]
