"""Writes a model folder into the repository atomically: staged beside it, one process at a time."""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RANDOM_ENDING = re.compile(r"\.[a-z0-9_]{8}(?:\.old)?")  # of mkdtemp, and of a swap in two steps
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


@contextmanager
def staging_folder(parent: Path, name: str) -> Iterator[Path]:
    """An empty folder, removed afterwards, as are those of earlier calls. The caller holds the model's lock."""
    parent.mkdir(parents=True, exist_ok=True)
    for remains in parent.glob(f"{name}.*"):
        if _RANDOM_ENDING.fullmatch(remains.name.removeprefix(name)):  # not those of a model `name.v2`
            remove(remains)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=parent))
    try:
        yield folder
    finally:
        remove(folder)


def remove(path: Path) -> None:
    """Removes a folder, file or link; ignores errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def replace_folder(staged: Path, target: Path) -> None:
    """Moves `staged` to target atomically; an old target moves to `staged`. One file system. Raises OSError."""
    _sync_tree(staged)
    staged.chmod(0o755)  # with mkdtemp's 0700, a Triton of another user could not read it
    if not os.path.lexists(target):
        staged.rename(target)
    elif not _exchange(staged, target):
        _swap_in_two_steps(staged, target)
    _sync(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps the two names atomically. False if the system does not support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _swap_in_two_steps(staged: Path, target: Path) -> None:
    aside = staged.with_name(f"{staged.name}.old")
    target.rename(aside)
    try:
        staged.rename(target)
    except OSError:
        aside.rename(target)
        raise
    aside.rename(staged)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FULL = (errno.ENOSPC, errno.EDQUOT)


def repository_of(home: Path) -> Path:
    """The model repository of pulled models; contains only complete models."""
    return home / "models"


def downloads_of(home: Path) -> Path:
    """Folder of downloads and locks."""
    return home / "downloads"


def staging_of(home: Path) -> Path:
    """Folder for models in preparation."""
    return home / "staging"


@contextmanager
def new_model_folder(home: Path, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """An empty folder to fill. On success it becomes the model `name` in home's repository, else nothing changes.

    on_wait: called before waiting for another process that makes this model. Raises OSError; see disk_sentence.
    """
    for folder in (downloads_of(home), staging_of(home), repository_of(home)):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(downloads_of(home) / f"{name}.lock", on_wait), staging_folder(staging_of(home), name) as staged:
        yield staged
        replace_folder(staged, repository_of(home) / name)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """The model's lock between processes; the system releases it if this process dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_disk_full(error: OSError) -> bool:
    """Whether the file system is full, or the user's quota exceeded."""
    return error.errno in _FULL


def disk_sentence(error: OSError, home: Path, *, needs_bytes: int | None = None) -> str:
    """The error text for the user, with advice. needs_bytes: size of the model, if known."""
    if is_disk_full(error):
        space = f"{needs_bytes / 1e6:.1f} MB" if needs_bytes is not None else "some room"
        return f"the disk of {home} is full: free {space} or choose another with PENSTOCK_HOME"
    if error.errno == errno.EXDEV:
        return f"{home} and its models/ are on two file systems, so nothing can land at once: mount {home} as a whole"
    where = os.fsdecode(error.filename) if error.filename is not None else home
    why = os.strerror(error.errno) if error.errno else str(error)
    return f"{where} cannot be written ({why}): make {home} writable or choose another with PENSTOCK_HOME"
