"""Pictures in the gateway's slab: a batch holds references, and the model's process reads where a worker wrote.

Also used by the gateway; it is here, because Triton's model process has no other package of penstock.
"""

import mmap
import os
import secrets
import struct
from pathlib import Path

FILE_VARIABLE = "PENSTOCK_SLAB_FILE"  # by which the model process gets the file's path
FILE_NAME = "slab-of-pictures"  # in the stack's run directory
UNREADABLE = "the gateway's shared memory cannot be read"
_MARK = b"penstock-slab\0"  # begins no picture
_TOKEN_BYTES = 16
_REFERENCE = struct.Struct(f"<{len(_MARK)}s{_TOKEN_BYTES}sQQ")


class SlabUnreadable(Exception):
    """A reference to memory that this process cannot read. The gateway then sends the pictures themselves."""


def publish_slab(file: Path, descriptor: int, size_bytes: int) -> bytes:
    """Publishes memory in a file for processes of the same user. Returns its token. Replaces the file.

    descriptor: of the memory, in this process. Raises OSError.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    staged = file.with_name(f"{file.name}.new")
    staged.unlink(missing_ok=True)
    with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
        written.write(f"{os.getpid()} {descriptor} {size_bytes} {token.hex()}")
    staged.replace(file)
    return token


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
        """The published memory, if this is its token."""
        try:
            process_id, descriptor, size_bytes, published = Path(self._file or "").read_text().split()
            if bytes.fromhex(published) != token:
                return None
            opened = os.open(f"/proc/{int(process_id)}/fd/{int(descriptor)}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                mapped = mmap.mmap(opened, int(size_bytes), prot=mmap.PROT_READ)
            finally:
                os.close(opened)
        except (OSError, ValueError) as error:
            raise SlabUnreadable(f"{UNREADABLE}: {error}") from error
        newest = list(self._memories.items())[-1:]
        self._memories = dict([*newest, (token, memoryview(mapped))])
        return self._memories[token]
