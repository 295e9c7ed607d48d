"""A limit of this process's memory: a model that needs too much fails a call and does not end the process."""

import contextlib
import re
import resource
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from .threads import CGROUP_ROOT, cgroup_folders

MIB = 1 << 20
CHECK_EVERY_S = 1.0
LONG_RUN_S = 0.005  # runs that fill much memory take longer; shorter runs are not checked
RESERVE = 0.08  # of all memory, for other processes
_LEAST_ROOM_BYTES = 128 * MIB  # the process may grow by this much even if the machine has no memory left
_PRESSURE = 0.15  # of the limit: with less room, models return unused memory
_NO_LIMIT = 1 << 60


class Releases(Protocol):
    """A model that can return unused memory."""

    def release_memory(self) -> None: ...


def machine_bytes(
    proc: Path = Path("/proc"), cgroups: Path = CGROUP_ROOT, own_cgroup: Path = Path("/proc/self/cgroup")
) -> tuple[int, int] | None:
    """(all, available) memory of the machine, or of this process's cgroup if that has less; None if not known."""
    system = _numbers(proc / "meminfo")
    if not {"MemTotal", "MemAvailable"} <= system.keys():
        return None
    total, available = system["MemTotal"] * 1024, system["MemAvailable"] * 1024
    for folder in cgroup_folders(cgroups, own_cgroup, "memory"):
        limit, used = (
            _first_number(folder / "memory.max", folder / "memory.limit_in_bytes"),
            _first_number(folder / "memory.current", folder / "memory.usage_in_bytes"),
        )
        if limit is not None and used is not None and limit < _NO_LIMIT:
            stat = _numbers(folder / "memory.stat")
            cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))  # v1's own value excludes children
            total, available = min(total, limit), min(available, limit - used + cached)
    return total, max(available, 0)


def mapped_bytes(status: Path = Path("/proc/self/status")) -> tuple[int, int] | None:
    """This process's private memory: (mapped, in use). None if not known."""
    own = _numbers(status)
    return (own["VmData"] * 1024, own["RssAnon"] * 1024) if {"VmData", "RssAnon"} <= own.keys() else None


class MemoryLimit:
    """Limits this process's private memory to what the machine, or its container, has. Thread-safe.

    Allocations beyond the limit fail: ONNX Runtime returns an error for this call, Python raises MemoryError. Memory of
    GPUs, and pinned memory, do not count.
    """

    def __init__(self) -> None:
        self._models: weakref.WeakSet[Releases] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._untouched_bytes: int | None = None
        self._checked_s = self._released_s = float("-inf")

    def add(self, model: Releases) -> None:
        """Limits the process from now on. The model returns unused memory when little is left."""
        with self._lock:
            self._models.add(model)
        self.check()

    def check(self, max_age_s: float = 0.0) -> None:
        """Adapts the limit to the available memory, unless that was done in the last max_age_s."""
        now = time.monotonic()
        if now - self._checked_s < max_age_s or not self._lock.acquire(blocking=False):
            return
        try:
            self._checked_s = now
            has_pressure = self._adapt() and now - self._released_s >= CHECK_EVERY_S
            if has_pressure:
                self._released_s = now
        finally:
            self._lock.release()
        if has_pressure:
            self.release()

    def release(self) -> None:
        """Makes all models return unused memory to the system."""
        with self._lock:
            models = list(self._models)
        for model in models:
            model.release_memory()

    def _adapt(self) -> bool:
        """Sets the limit. Returns whether little room is left."""
        machine, own = machine_bytes(), mapped_bytes()
        if machine is None or own is None:
            return False
        (total, available), (mapped, used) = machine, own
        if self._untouched_bytes is None:
            self._untouched_bytes = max(mapped - used, 0)  # such as stacks of threads: counted, but not used
        room = max(available - int(total * RESERVE), _LEAST_ROOM_BYTES)
        limit = self._untouched_bytes + used + room
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        return limit - mapped < limit * _PRESSURE


_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|failed to allocate memory|available memory of \d+ is smaller than requested|MemoryError", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ONNX Runtime, or Python, could not allocate memory."""
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


def prefer_for_oom_kill() -> None:
    """Makes the kernel kill this process before Triton if the machine runs out of memory."""
    with contextlib.suppress(OSError):  # not writable everywhere; then the kernel's default applies
        Path("/proc/self/oom_score_adj").write_text("500")


def _numbers(path: Path) -> dict[str, int]:
    """The file's lines `name: number …` or `name number`; empty if it cannot be read."""
    try:
        lines: Iterable[str] = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ", 1).split() for line in lines)
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}


def _first_number(*paths: Path) -> int | None:
    """The number in the first of the files that has one."""
    for path in paths:
        try:
            text = path.read_text("ascii", "replace").strip()
        except OSError:
            continue
        if text.isdecimal():
            return int(text)
    return None
