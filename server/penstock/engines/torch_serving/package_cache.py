"""A folder of compiled programs that processes share: one compiles, the others wait; the oldest are removed."""

import fcntl
import os
import shutil
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
    """The file of that key, made first if it is missing; it stays while the context is open. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_MAY_WRITE:
        raise OSError(f"{folder} can be written by other users: compiled programs are code; chmod 700 it")
    path = folder / f"{key}{_SUFFIX}"
    with _locked(folder / f"{key}.lock"):
        if not path.is_file():
            report("compiles the program by AOTInductor, once: 1 to 3 minutes")
            with tempfile.TemporaryDirectory(dir=folder, prefix="new-") as staged:
                make(Path(staged) / "program.pt2")
                (Path(staged) / "program.pt2").replace(path)
            evict(folder, path)
        with suppress(OSError):
            os.utime(path)
        yield path


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
                    raise OSError(f"another process has {path} for {timeout_s:.0f} s") from None
                time.sleep(_POLL_S)
        yield


def evict(folder: Path, newest: Path, max_bytes: int = _MAX_BYTES) -> None:
    """Removes compiled files, those used longest ago first, until the rest fits; and what killed processes left."""
    kept = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = newest.stat().st_size
    for path in kept:
        if path != newest:
            total += path.stat().st_size
            if total > max_bytes:
                path.unlink(missing_ok=True)
    for path in (*folder.glob("new-*"), *folder.glob("*.lock")):
        with suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > _ABANDONED_S
            if is_old and path.suffix != ".lock":
                shutil.rmtree(path, ignore_errors=True)
            elif is_old and not path.with_suffix(_SUFFIX).exists():
                path.unlink()
