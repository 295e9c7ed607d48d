"""A folder whose Unix sockets can be reached, however long its own path is."""

import os
from pathlib import Path

MAX_PATH_BYTES = 107  # of a Unix socket's, on Linux
ROOM_BYTES = 24  # for the sockets' own names


def reachable(folder: Path) -> Path:
    """The folder, or where sockets in it would have paths too long, another path to it that only this process has.

    That path is good until this process ends.
    """
    if len(os.fsencode(folder)) + ROOM_BYTES <= MAX_PATH_BYTES:
        return folder
    return Path(f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}")
