"""A model's folder in the repository under PENSTOCK_HOME: one process at a time, complete and at once."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from server.catalogue.landing import land, staging_folder

_FULL = (errno.ENOSPC, errno.EDQUOT)


def repository_of(home: Path) -> Path:
    """The model repository that pulls fill; nothing but finished models ever sits in it."""
    return home / "models"


def downloads_of(home: Path) -> Path:
    """Where what is fetched waits, and the locks are."""
    return home / "downloads"


def staging_of(home: Path) -> Path:
    """Where folders are filled before they land."""
    return home / "staging"


@contextmanager
def new_model_folder(home: Path, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """An empty folder for the caller to fill. A block that ends well makes it the model `name` in home's repository.

    An older folder of that name is replaced; readers see the old one or the new one. A block that raises leaves the
    repository as it was. on_wait: called before another process that makes or pulls this model is waited for. Raises
    OSError, of which disk_sentence makes a sentence.
    """
    for folder in (downloads_of(home), staging_of(home), repository_of(home)):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(downloads_of(home) / f"{name}.lock", on_wait), staging_folder(staging_of(home), name) as staged:
        yield staged
        land(staged, repository_of(home) / name)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """The model's lock, ours alone among processes; the system frees it when we die."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_disk_full(error: OSError) -> bool:
    """Whether the file system, or the user's share of it, is full."""
    return error.errno in _FULL


def disk_sentence(error: OSError, home: Path, *, needs_bytes: int | None = None) -> str:
    """What the disk refused, and what to do. needs_bytes: of the model, where that is known."""
    if is_disk_full(error):
        room = f"{needs_bytes / 1e6:.1f} MB" if needs_bytes is not None else "some room"
        return f"the disk of {home} is full: free {room} or choose another with PENSTOCK_HOME"
    if error.errno == errno.EXDEV:
        return f"{home} and its models/ are on two file systems, so nothing can land at once: mount {home} as a whole"
    where = os.fsdecode(error.filename) if error.filename is not None else home
    why = os.strerror(error.errno) if error.errno else str(error)
    return f"{where} cannot be written ({why}): make {home} writable or choose another with PENSTOCK_HOME"
