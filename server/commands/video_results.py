"""The files of a run: those that an earlier one left, and those that this one wrote."""

import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

EVENTS_FILE, OBJECTS_FILE = "events.jsonl", "objects.jsonl"
_CLOCK_SLACK_S = 2.0  # file systems round


def move_earlier_aside(folders: Iterable[Path], note: Callable[[str], None]) -> None:
    """What an earlier run wrote becomes NAME.1, since the frames of two runs in one file cannot be told apart.

    note: told of each that was moved.
    """
    for folder in folders:
        for name in (EVENTS_FILE, OBJECTS_FILE):
            _move_aside(folder / name, note)


def written_files(folders: Iterable[Path], since_s: float) -> tuple[tuple[Path, int], ...]:
    """Path and size of the files in the folders that changed in the last so many seconds, sorted."""
    began = time.time() - since_s - _CLOCK_SLACK_S
    found: dict[Path, int] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        with suppress(OSError):
            status = path.stat()
            if path.is_file() and status.st_mtime >= began:
                found[path] = status.st_size
    return tuple(found.items())


def is_same_file(one: Path, other: Path) -> bool:
    """Whether both names are of one file, or would be, where it is not there yet."""
    with suppress(OSError):
        return one.samefile(other)
    return one.resolve() == other.resolve()


def write_whole(path: Path, content: bytes) -> None:
    """All of it, or what was there stays. Raises OSError."""
    at = path.resolve()  # a link stays one
    if path.is_relative_to("/dev") or (at.exists() and not at.is_file()):  # who reads it has it open already
        at.write_bytes(content)
        return
    beside = at.with_name(f".{at.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        if at.exists():
            shutil.copymode(at, beside)
        beside.replace(at)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _move_aside(path: Path, note: Callable[[str], None]) -> None:
    if not _size(path):
        return
    with suppress(OSError):  # the sink will say what it cannot write
        path.rename(path.with_name(f"{path.name}.1"))
        note(f"{path} of an earlier run is now {path.name}.1")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
