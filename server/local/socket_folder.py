"""Makes Unix sockets in a folder reachable, whatever the folder's path is."""

import os
import re
from pathlib import Path

MAX_PATH_BYTES = 107  # of a Unix socket's, on Linux
ROOM_BYTES = 24  # for the sockets' own names
_UNQUOTED = re.compile(r"[A-Za-z0-9/._~-]+")  # a gRPC target is a URI: other characters are quoted there


def reachable(folder: Path) -> Path:
    """The folder, or another path to it that only this process has, where a socket's own path would not do.

    That is where it would be too long, or has characters that a URI quotes. The other path is good until this process
    ends.
    """
    if _UNQUOTED.fullmatch(str(folder)) and len(os.fsencode(folder)) + ROOM_BYTES <= MAX_PATH_BYTES:
        return folder
    return Path(f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}")
