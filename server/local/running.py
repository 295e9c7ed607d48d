"""The stacks of this user that run on this host, for programs that would be their guests.

A stack says where it listens in a small file of its run directory, when it is ready; the file goes with the directory.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from server.backends.reaper import is_owned
from server.core.address import is_loopback
from server.local.messages import PROTOCOL

_NAME = "running.json"
_MOST_BYTES = 4096


class _Told(msgspec.Struct):
    """What the file says."""

    http_url: str
    grpc_address: str
    process_id: int
    protocol: int = 0
    mps_directory: str = ""


@dataclass(frozen=True, slots=True)
class RunningStack:
    """One that was ready, and whose owner lives. run_dir: where it takes guests. process_id: of its first process.
    mps_directory: of the MPS daemon whose client its engine is; empty where it is none's."""

    run_dir: Path
    http_url: str
    grpc_address: str
    process_id: int
    mps_directory: str = ""


def run_folders() -> Path:
    """Where the stacks of this user have their run directories."""
    return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"


def tell_running(run_dir: Path, http_url: str, grpc_address: str, mps_directory: str = "") -> None:
    """For `running_stacks`, until the run directory is removed. By the directory's owner; harmless again.

    Raises OSError.
    """
    told = msgspec.json.encode(_Told(http_url, grpc_address, os.getpid(), PROTOCOL, mps_directory))
    new = run_dir / f"{_NAME}.new"
    new.touch(mode=0o600)
    new.write_bytes(told)
    new.replace(run_dir / _NAME)


def running_stacks(base: Path | None = None) -> tuple[RunningStack, ...]:
    """Those that run now, the newest first. base: the run directories' folder, of this user unless given.

    What a killed stack left is no stack; nor is anything where others may write, nor one of another version, whose
    socket speaks otherwise: its ports are open to all.
    """
    folder = base or run_folders()
    if not _is_ours_alone(folder):
        return ()
    found = [read for path in folder.glob(f"run-*/{_NAME}") if (read := _read(path)) is not None]
    return tuple(stack for _, stack in sorted(found, key=lambda item: item[0], reverse=True))


def stack_at(http_url: str, base: Path | None = None) -> RunningStack | None:
    """The stack of this host that listens at that address; None where it is somebody else's, or on another host."""
    asked = urlsplit(http_url)
    if not is_loopback(asked.hostname or ""):
        return None
    stacks = running_stacks(base)
    return next((stack for stack in stacks if urlsplit(stack.http_url).port == asked.port), None)


def _is_ours_alone(folder: Path) -> bool:
    try:
        status = folder.lstat()  # not stat: a symbolic link's target could change later
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _read(path: Path) -> tuple[int, RunningStack] | None:
    """When it was ready, and what it is."""
    try:
        ready_at = path.stat().st_mtime_ns
        text = path.read_bytes()[:_MOST_BYTES]
        told = msgspec.json.decode(text, type=_Told)
    except (OSError, msgspec.DecodeError):
        return None
    if told.protocol != PROTOCOL or not is_owned(path.parent):
        return None
    return ready_at, RunningStack(path.parent, told.http_url, told.grpc_address, told.process_id, told.mps_directory)
