"""A folder of compiled programs that processes share: one compiles, the others wait; the oldest are removed."""

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER_VARIABLE = "PENSTOCK_COMPILED_PROGRAMS"
_MAX_BYTES = 4 << 30
_LOCK_TIMEOUT_S = 900.0  # another process compiles the same program meanwhile
_POLL_S = 0.5
_SUFFIX = ".compiled.pt2"
_ABANDONED_S = 3600.0
_OTHERS_MAY_WRITE = 0o022


def cache_folder() -> Path:
    """Of the user."""
    given = os.environ.get(FOLDER_VARIABLE, "")
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(given) if given else Path(root) / "penstock" / "programs"


@contextmanager
def package_of(
    folder: Path, key: str, make: Callable[[Path], object], report: Callable[[str], object]
) -> Iterator[Path]:
    """The file of that key, made first if it is missing; it stays while the context is open. Raises OSError.

    The file is code, so this user must own it, and its content must have the hash in its name. Other files are removed
    and compiled again.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    with _locked(folder / f"{key}.lock"):
        path = _found(folder, key)
        if path is None:
            report("compiles the program by AOTInductor, once: 1 to 3 minutes")
            path = _made(folder, key, make)
            evict(folder, path)
        with suppress(OSError):
            os.utime(path)
        yield path


def _check_private(folder: Path) -> None:
    """Raises OSError if other users can put files there, or another folder in its place."""
    real = folder.resolve()
    found = real.stat()
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_MAY_WRITE:
        raise OSError(f"{folder} can be written by other users: compiled programs are code; chmod 700 it")
    for parent in real.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise OSError(f"{parent} can be written by other users, so they can replace {folder}: use another folder")


def _found(folder: Path, key: str) -> Path | None:
    for path in folder.glob(f"{key}.*{_SUFFIX}"):
        if _is_trusted(path):
            return path
        path.unlink(missing_ok=True)
    return None


def _is_trusted(path: Path) -> bool:
    """Whether it is a file of this user, as it was made. Another user may have put it there before a chmod."""
    found = path.lstat()
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
    return is_own and not found.st_mode & _OTHERS_MAY_WRITE and path.name.split(".")[-3] == _digest(path)


def _made(folder: Path, key: str, make: Callable[[Path], object]) -> Path:
    with tempfile.TemporaryDirectory(dir=folder, prefix="new-") as staged:
        file = Path(staged) / "program.pt2"
        make(file)
        file.chmod(0o600)
        path = folder / f"{key}.{_digest(file)}{_SUFFIX}"
        file.replace(path)
    return path


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:32]


@contextmanager
def _locked(path: Path, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
    """Raises OSError if another process has the lock for too long."""
    until_s = time.monotonic() + timeout_s
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise OSError(f"another process has used {path} for {timeout_s:.0f} s") from None
                time.sleep(_POLL_S)
        yield


def evict(folder: Path, newest: Path, max_bytes: int = _MAX_BYTES) -> None:
    """Removes compiled files, those used longest ago first, until the rest fits; and what killed processes left."""
    found = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(FileNotFoundError):  # another process removes files, too
            found.append((path.lstat(), path))
    total = newest.stat().st_size
    for facts, path in sorted(found, key=lambda one: one[0].st_mtime, reverse=True):
        if path != newest:
            total += facts.st_size
            if total > max_bytes:
                path.unlink(missing_ok=True)
    for path in (*folder.glob("new-*"), *folder.glob("*.lock")):
        with suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > _ABANDONED_S
            if is_old and path.suffix != ".lock":
                shutil.rmtree(path, ignore_errors=True)
            elif is_old and not any(folder.glob(f"{path.stem}.*{_SUFFIX}")):
                path.unlink()
