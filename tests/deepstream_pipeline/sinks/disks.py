"""Disks that are small, and full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, size_kib: int = 1024) -> Iterator[Path]:
    """A file system of that size, mounted on the folder; skips where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("only root mounts a small tmpfs")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], timeout=30, check=False)


def fill(folder: Path, *, leave_kib: int = 0) -> Path:
    """The file that takes the rest of the disk, but for that much."""
    filler = folder / "filler"
    free = os.statvfs(folder)
    with filler.open("wb", buffering=0) as file:
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - leave_kib * 1024)))
    return filler
