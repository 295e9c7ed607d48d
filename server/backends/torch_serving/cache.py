"""What a load of a program finds out or makes, kept for the next load of the same on the same kind of device."""

import fcntl
import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .config import EngineSpec


def folder_of(path: Path, spec: EngineSpec, device: Any) -> Path:
    """The folder of a program's file, there: in the user's cache, or a temporary one where that cannot be written."""
    folder = _root() / _key(path, spec, device)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One instance at a time; the system frees the lock when its process dies."""
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(path: Path, spec: EngineSpec, device: Any) -> str:
    """Everything that what is kept depends on: the file, PyTorch, the device's kind, precision and layout."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    kind = platform.machine()
    if device.type == "cuda":
        capability = "".join(map(str, torch.cuda.get_device_capability(device)))
        kind = f"sm{capability}-cudnn{torch.backends.cudnn.version()}"
    words = (digest.hexdigest()[:16], torch.__version__, kind, spec.precision.value, f"cl{int(spec.is_channels_last)}")
    return "-".join(words)


def _root() -> Path:
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        root = chosen.expanduser() / "penstock" / "torch"
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except (OSError, RuntimeError):  # RuntimeError: of expanduser, for a user without a home
        return Path(tempfile.gettempdir()) / f"penstock-torch-{os.getuid()}"
