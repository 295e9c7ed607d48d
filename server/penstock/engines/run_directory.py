"""Run directories of engines, and removal of a killed engine's processes and shared memory.

Every process of an engine has its ID in ENGINE_ID_VARIABLE, and its models' shared-memory regions have it in their
names (`region_prefix`). Regions with Triton's own names are found by the processes that map them. A run directory is
locked while its owner lives, so that the next start finds orphaned engines.
"""

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ENGINE_ID_VARIABLE = "PENSTOCK_ENGINE_ID"
SHARED_MEMORY = Path("/dev/shm")
REAP_S = 2.0
_RUN_NAME = re.compile(r"run-(?P<engine_id>[0-9a-f]{12})")
_LOCK_NAME = "owner"
# Triton's names for regions of Python-based backends; clients' regions have other names.
_STUB_REGION = re.compile(
    rb"/dev/shm/(triton_\w+_backend_shm_region_[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"
)


class RunDirectoryRefused(Exception):
    """The folder for run directories cannot be made, or others may write to it. Its text is for the user."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """Remains of one engine. survivors: processes that did not end in time."""

    killed: tuple[int, ...] = ()
    regions: tuple[str, ...] = ()
    survivors: tuple[int, ...] = ()


def region_prefix(engine_id: str) -> str:
    """Name prefix of the engine's shared-memory regions."""
    return f"penstock_{engine_id}_"


def reap(engine_id: str, *, child_pid: int | None = None) -> Reaped:
    """Kills all processes with this id and removes their shared-memory regions. Blocks for at most REAP_S.

    Survivors' regions stay. child_pid: a process whose exit code the caller awaits.
    """
    until = time.monotonic() + REAP_S
    killed: dict[int, None] = {}
    mapped: set[str] = set()
    while True:
        with contextlib.ExitStack() as handles:
            found = {pid: handles.enter_context(_closing(fd)) for pid, fd in _open_marked(engine_id)}
            killed |= dict.fromkeys(found)
            mapped.update(*(_mapped_regions(pid, handle) for pid, handle in found.items()))
            for handle in found.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            survivors = [pid for pid, handle in found.items() if not _ends(handle, until)]
        for pid in found.keys() - {child_pid}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # orphans are our children if we are process 1
        if not found or survivors:
            break
    regions = () if survivors else _remove_regions(engine_id, mapped)
    return Reaped(tuple(killed), regions, tuple(survivors))


def _open_marked(engine_id: str) -> Iterator[tuple[int, int]]:
    """Process ids and pidfds. The pidfd is opened first, so that a reused process id is not mistaken."""
    mark = f"{ENGINE_ID_VARIABLE}={engine_id}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            handle = os.pidfd_open(int(name))
        except OSError:
            continue
        if _is_marked(name, mark) and not _ends(handle, 0.0):
            yield int(name), handle
        else:
            os.close(handle)


def _is_marked(pid: str, mark: bytes) -> bool:
    try:
        environ = Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return False
    return mark in environ.split(b"\0")


def _ends(handle: int, until: float) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(max(0.0, until - time.monotonic()) * 1000.0))


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _mapped_regions(pid: int, handle: int) -> set[str]:
    """The stub regions that the process maps; empty if it has ended, because its id may be reused."""
    try:
        maps = Path("/proc", str(pid), "maps").read_bytes()
    except OSError:
        return set()
    return set() if _ends(handle, 0.0) else {name.decode() for name in _STUB_REGION.findall(maps)}


def _remove_regions(engine_id: str, mapped: set[str]) -> tuple[str, ...]:
    named = {path.name for path in SHARED_MEMORY.glob(f"{region_prefix(engine_id)}*")}
    removed: list[str] = []
    for name in sorted(named | mapped):
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / name).unlink()
            removed.append(name)
    return tuple(removed)


class RunDirectory:
    """A folder for one engine, with `engine_id` in its name; removed by `release()`."""

    def __init__(self, path: Path, engine_id: str, lock: int) -> None:
        self.path = path
        self.engine_id = engine_id
        self._lock = lock

    def release(self) -> None:
        """Removes the folder. The engine must have been stopped. May be called again."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim_run_directory(base: Path) -> tuple[RunDirectory, tuple[Reaped, ...]]:
    """A new run directory, and what killed owners had left. Raises RunDirectoryRefused if others may write to base."""
    with _locked_base(base):
        reaped = _sweep(base)
        engine_id = uuid.uuid4().hex[:12]
        path = base / f"run-{engine_id}"
        path.mkdir(mode=0o700)
        lock = _lock(path / _LOCK_NAME)
        if lock is None:
            raise RunDirectoryRefused(f"{path} was locked by another process while it was created")
        os.write(lock, f"{os.getpid()}\n".encode())
    return RunDirectory(path, engine_id, lock), reaped


def is_owned(path: Path) -> bool:
    """Whether the run directory's owner lives. Locks it briefly, so do not use it during creation."""
    try:
        lock = os.open(path / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    with _closing(lock):
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _sweep(base: Path) -> tuple[Reaped, ...]:
    reaped: list[Reaped] = []
    for path in sorted(base.iterdir()):
        name = _RUN_NAME.fullmatch(path.name)
        lock = _lock(path / _LOCK_NAME) if name is not None and path.is_dir() else None
        if name is None or lock is None:
            continue
        with _closing(lock):
            left = reap(name["engine_id"])
            reaped.append(left)
            if not left.survivors:
                shutil.rmtree(path, ignore_errors=True)
    return tuple(reaped)


def _lock(path: Path) -> int | None:
    """The locked file, or None if a living process has the lock. The kernel releases it when that process dies."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def make_private(base: Path) -> None:
    """Creates the folder if necessary. Raises OSError; RunDirectoryRefused for a link or if others may write to it."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = base.lstat()  # not stat: the owner of a symbolic link may change its target later
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise RunDirectoryRefused(
            f"{base} belongs to user {status.st_uid} with mode {status.st_mode & 0o7777:o}; programs are run from it, "
            "so it must be a folder (not a symbolic link) of yours that only you can write to: chmod 700 it or choose "
            "another"
        )


@contextlib.contextmanager
def _locked_base(base: Path) -> Iterator[None]:
    """Prevents two starts from seeing each other's incomplete run directories."""
    try:
        make_private(base)
        guard = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunDirectoryRefused(f"{base} cannot hold run directories: {error.strerror}") from error
    with _closing(guard):
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield
