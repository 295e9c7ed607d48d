"""FAULTS 90: only the stack's user can access its files in /dev/shm and in its run directory."""

import os
import re
import stat
from pathlib import Path

import psutil
import pytest

from tests.integration.living import family, gateway_of
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")

OTHERS = 0o077


def shared_files(stack: RunningStack) -> set[Path]:
    """The named files in /dev/shm that the processes of the stack map."""
    found: set[Path] = set()
    for process in family(stack):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        found |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return {path for path in found if path.exists()}


def open_to_others(path: Path) -> bool:
    status = path.lstat()
    return status.st_uid != os.geteuid() or (not path.is_symlink() and bool(stat.S_IMODE(status.st_mode) & OTHERS))


def test_files_in_shared_memory_are_for_their_user_only(stack: RunningStack) -> None:
    """This covers Triton's regions, which contain clients' tensors, and ours."""
    files = shared_files(stack)
    assert files, "models of Triton's Python backend have regions"
    assert [path for path in files if open_to_others(path)] == []


def test_run_directory_and_sockets_are_for_their_user_only(stack: RunningStack) -> None:
    """The folder has mode 0700, and other users cannot read the sockets and settings in it."""
    run_dir = Path(gateway_of(stack).cmdline()[3]).parent
    sockets = [path for path in run_dir.rglob("*") if path.is_socket()]
    assert not open_to_others(run_dir)
    assert not open_to_others(run_dir / "settings.json")
    assert [path for path in sockets if open_to_others(path)] == []


def test_processes_of_a_stack_create_files_for_their_user_only(stack: RunningStack) -> None:
    """This covers files that gateway, Triton and its models create later."""
    umasks = {}
    for process in family(stack):
        try:
            words = re.search(r"^Umask:\s*(\d+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
            umasks[process.name()] = words[1] if words else ""
        except (OSError, psutil.NoSuchProcess):
            continue
    assert umasks
    assert set(umasks.values()) == {"0077"}, umasks
