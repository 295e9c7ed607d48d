"""Files by whose locks this user's decode processes agree: who makes a decoder now, who has which core.

They lie in a folder of the system's for temporary files, in which everybody may make one of any name: one that is not
this user's alone is not used, and who gets no file goes on without a lock. The system gives a lock back for whoever
dies with it. Programs that see another folder, as in another container, are not seen.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def open_lock(name: str) -> int | None:
    """The descriptor of the file of that name, made where it is not there, and not locked yet; the caller closes it.

    None where there is none to be had: its folder is a link, another user's, or one in which others may write.
    """
    try:
        path = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        folder = os.open(path, _FOLDER_FLAGS)
    except OSError:
        return None
    try:
        return os.open(name, _FILE_FLAGS, 0o600, dir_fd=folder) if _is_ours_alone(folder) else None
    except OSError:
        return None
    finally:
        os.close(folder)


def _is_ours_alone(folder: int) -> bool:
    """Of the folder that is open, which nobody can put another in the place of."""
    status = os.fstat(folder)
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
