"""Which processes an engine has, and which of them hold a GPU, read from /proc."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
_COMPUTES = re.compile(r"/dev/nvidia-uvm(?:\Z| \(deleted\))")  # NVML opens the cards' own files; only CUDA this one


def marked(mark: str, proc: Path = PROC) -> frozenset[int]:
    """The processes that carry it in their environment, `NAME=value`; those that we may not read are not ours."""
    wanted = mark.encode()
    return frozenset(pid for pid in _pids(proc) if wanted in _environ(proc, pid).split(b"\0"))


def holding(pids: frozenset[int], proc: Path = PROC) -> frozenset[int]:
    """Those that CUDA has opened a card for."""
    return frozenset(pid for pid in pids if any(_COMPUTES.match(target) for target in _open_files(proc, pid)))


def exist(pids: frozenset[int], proc: Path = PROC) -> bool:
    """Whether any of them is a process here; true where none is asked for."""
    return not pids or any((proc / str(pid)).exists() for pid in pids)


def _pids(proc: Path) -> Iterator[int]:
    return (int(name) for name in os.listdir(proc) if name.isdecimal())


def _environ(proc: Path, pid: int) -> bytes:
    try:
        return (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return b""


def _open_files(proc: Path, pid: int) -> Iterator[str]:
    try:
        names = os.listdir(proc / str(pid) / "fd")
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(proc / str(pid) / "fd" / name)
        except OSError:  # closed meanwhile
            continue
