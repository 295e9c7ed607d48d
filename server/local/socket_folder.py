"""Makes Unix sockets reachable in folders with any path."""

import os
import re
from pathlib import Path

MAX_PATH_BYTES = 107  # of a Unix socket's, on Linux
ROOM_BYTES = 24  # for the sockets' own names
_UNQUOTED = re.compile(r"[A-Za-z0-9/._~-]+")  # a gRPC target is a URI, in which other characters would be quoted


def reachable(folder: Path) -> Path:
    """The folder itself, or another path to it for this process, if a socket's path there cannot be used.

    It cannot if it would be too long, or has characters that a URI quotes. The other path is valid until this process
    ends.
    """
    if _UNQUOTED.fullmatch(str(folder)) and len(os.fsencode(folder)) + ROOM_BYTES <= MAX_PATH_BYTES:
        return folder
    return Path(f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}")
