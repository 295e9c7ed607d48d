"""Running stacks of this user on this host. A ready stack writes its addresses to a file in its run directory."""

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.engines.run_directory import is_owned
from penstock.gateway.workers.connection import PROTOCOL
from penstock.network import is_loopback

MAX_PATH_BYTES = 107  # of a Unix socket on Linux
ROOM_BYTES = 24  # for a socket's own name
UP_CHILD = "penstock_video.cli.up_child"  # module in the command line of a video program's own stack
_UNQUOTED = re.compile(r"[A-Za-z0-9/._~-]+")  # a gRPC target is a URI, which quotes other characters


def reachable_folder(folder: Path) -> Path:
    """The folder, or while this process lives another path to it if a Unix socket's path there is invalid."""
    if _UNQUOTED.fullmatch(str(folder)) and len(os.fsencode(folder)) + ROOM_BYTES <= MAX_PATH_BYTES:
        return folder
    return Path(f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}")


_STACK_FILE_NAME = "running.json"
_MAX_STACK_FILE_BYTES = 16_384  # three paths
PROGRAM = str(Path(__file__).resolve().parents[2])  # folder of this package: tells checkouts apart


class _StackFile(msgspec.Struct):
    http_url: str
    grpc_address: str
    process_id: int
    protocol: int = 0
    mps_directory: str = ""
    home: str = ""
    program: str = ""


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A ready stack whose owner runs. run_dir: has the core's socket. mps_directory: "" without MPS.

    home, program: its home, and the folder of its package; "" if an older Penstock wrote the file.
    """

    run_dir: Path
    http_url: str
    grpc_address: str
    process_id: int
    mps_directory: str = ""
    home: str = ""
    program: str = ""

    @property
    def label(self) -> str:
        """The URL, with the home if it is known."""
        return f"{self.http_url} (home {self.home})" if self.home else self.http_url


def run_folders() -> Path:
    """Folder of the run directories of this user's stacks."""
    return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"


def publish_stack(
    run_dir: Path, http_url: str, grpc_address: str, mps_directory: str = "", home: Path | None = None
) -> None:
    """Writes the file for `running_stacks`. Only for the run directory's owner; may be repeated. Raises OSError."""
    at = "" if home is None else str(home.resolve())
    encoded = msgspec.json.encode(_StackFile(http_url, grpc_address, os.getpid(), PROTOCOL, mps_directory, at, PROGRAM))
    new = run_dir / f"{_STACK_FILE_NAME}.new"
    new.touch(mode=0o600)
    new.write_bytes(encoded)
    new.replace(run_dir / _STACK_FILE_NAME)


def running_stacks(base: Path | None = None) -> tuple[RunningStack, ...]:
    """Running stacks of this protocol version, the newest first. base: folder of the run directories."""
    folder = base or run_folders()
    if not _is_ours_alone(folder):
        return ()
    found = [read for path in folder.glob(f"run-*/{_STACK_FILE_NAME}") if (read := _read_stack_file(path)) is not None]
    return tuple(stack for _, stack in sorted(found, key=lambda item: item[0], reverse=True))


def closest_stacks(stacks: Sequence[RunningStack], home: Path) -> tuple[RunningStack, ...]:
    """Those of this home and this checkout, else of this home, else of this checkout, else all; in the same order."""
    at = str(home.resolve())

    def rank(stack: RunningStack) -> tuple[bool, bool]:
        return stack.home == at, stack.program == PROGRAM

    best = max(map(rank, stacks), default=None)
    return tuple(stack for stack in stacks if rank(stack) == best)


def ambiguity(stacks: Sequence[RunningStack], used: RunningStack, home: Path) -> str:
    """Why the stack that a command uses may be another than is meant, with URLs and homes; "" if it is clear.

    stacks: of `closest_stacks`.
    """
    if len(stacks) > 1:
        others = ", ".join(stack.label for stack in stacks if stack is not used)
        return f"{len(stacks)} stacks run here: {used.label} is used; others are {others}"
    if used.home and used.home != str(home.resolve()):
        return f"{used.label} is used; no stack of this command's home runs here ({home.resolve()})"
    return ""


def is_bound(stack: RunningStack) -> bool:
    """Whether the stack is a video program's own engine, which ends with that program."""
    try:
        return UP_CHILD.encode() in Path(f"/proc/{stack.process_id}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def stack_at(http_url: str, base: Path | None = None) -> RunningStack | None:
    """The user's stack that listens at this address of this host, or None."""
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


def _read_stack_file(path: Path) -> tuple[int, RunningStack] | None:
    """When it was ready, and the stack."""
    try:
        ready_at = path.stat().st_mtime_ns
        text = path.read_bytes()[:_MAX_STACK_FILE_BYTES]
        file = msgspec.json.decode(text, type=_StackFile)
    except (OSError, msgspec.DecodeError):
        return None
    if file.protocol != PROTOCOL or not is_owned(path.parent):
        return None
    return ready_at, RunningStack(
        path.parent, file.http_url, file.grpc_address, file.process_id, file.mps_directory, file.home, file.program
    )
