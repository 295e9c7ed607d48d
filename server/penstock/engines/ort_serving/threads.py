"""Threads per model instance, such that all instances of a model together use each core once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ThreadBudget:
    """Threads of one model instance. is_one_session: instances share a session's pool, and add their own threads."""

    cores: int
    instances: int
    is_one_session: bool = False

    @property
    def threads(self) -> int:
        """As ONNX Runtime counts: with the calling thread."""
        if self.is_one_session:
            return max(1, self.cores - self.instances + 1)
        return max(1, self.cores // self.instances)

    @property
    def spinning(self) -> dict[str, str]:
        """Session entries for idle pool threads: one instance spins inside runs, several do not, for throughput."""
        if self.instances == 1:
            return {"session.force_spinning_stop": "1"}
        return {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}


def thread_budget(config: dict[str, Any], *, is_one_session: bool = False) -> ThreadBudget:
    """The budget of one instance of the configured model on this machine."""
    groups = config.get("instance_group", [])
    instances = sum(int(group.get("count", 1)) * max(1, len(group.get("gpus", []))) for group in groups)
    return ThreadBudget(available_cores(), max(1, instances), is_one_session)


def available_cores() -> int:
    """Usable cores: the affinity, or the cgroup's CPU quota if it is lower."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(CGROUP_ROOT, Path("/proc/self/cgroup"))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def cgroup_quota(root: Path, own_cgroup: Path) -> float | None:
    """The smallest CPU quota of this process's cgroup and its parents, in cores; None without a limit."""
    quotas = [quota for folder in cgroup_folders(root, own_cgroup, "cpu") if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def cgroup_folders(root: Path, own_cgroup: Path, controller: str) -> list[Path]:
    """Folders of the cgroup and its parents: at the root in a container, nested for a service."""
    found = [root, root / controller]
    for line in _read(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", controller):
            top = root / controllers
            nested = top.joinpath(*Path(path).parts[1:])
            found += [folder for folder in (nested, *nested.parents) if folder.is_relative_to(top)]
    return found


def _quota(folder: Path) -> float | None:
    """cgroup v2 has `cpu.max`, "150000 100000" or "max 100000"; v1 has two files, with -1 for no limit."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = (_read(folder / "cpu.cfs_quota_us") + _read(folder / "cpu.cfs_period_us")).split()
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
