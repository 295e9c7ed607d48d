"""Putting a finished folder where Triton looks: at once or not at all."""

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


@contextmanager
def staging_folder(parent: Path, name: str) -> Iterator[Path]:
    """An empty folder that is gone afterwards, whatever is in it then; earlier calls' remains of that name go too.

    The caller holds the model's lock.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for remains in parent.glob(f"{name}.*"):
        remove(remains)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=parent))
    try:
        yield folder
    finally:
        remove(folder)


def remove(path: Path) -> None:
    """Takes away a folder and all in it, a file, or a link; what cannot go stays, in silence."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def land(staged: Path, target: Path) -> None:
    """Moves the folder staged to target; what stood there is at staged afterwards. Both on one file system.

    A reader of target sees the old folder or the new one, complete. Raises OSError, and then target is as it was.
    """
    _sync_tree(staged)
    staged.chmod(0o755)  # mkdtemp's 0700 would hide it from a Triton that runs as somebody else
    if not os.path.lexists(target):
        staged.rename(target)
    elif not _exchange(staged, target):
        _swap_in_two_steps(staged, target)
    _sync(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps the two names in one step. False where this system cannot."""
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
