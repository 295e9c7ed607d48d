"""Threads of one model instance, such that all instances of a model together use each core once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ThreadBudget:
    """What one instance of a model gets when its configuration names no thread count.

    is_one_session: the instances are runs of one session at once. Its pool is theirs together, and each brings the
    thread that called it.
    """

    cores: int
    instances: int
    is_one_session: bool = False

    @property
    def threads(self) -> int:
        """As ONNX Runtime counts them: the calling thread is one of them."""
        if self.is_one_session:
            return max(1, self.cores - self.instances + 1)
        return max(1, self.cores // self.instances)

    @property
    def spinning(self) -> dict[str, str]:
        """Session entries for what idle pool threads do. FastestDet, inferences/s, spinning always | inside runs only |
        never: one instance on 2 cores 190 | 189 | 157, on 16 cores 280 | 275 | 235; two instances with two threads each
        on 2 cores, four clients, 150 | 145 | 245; four instances on 16 cores, eight clients, 905 | - | 1090 for half
        the CPU."""
        if self.instances == 1:
            return {"session.force_spinning_stop": "1"}
        return {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}


def thread_budget(config: dict[str, Any], *, is_one_session: bool = False) -> ThreadBudget:
    """The budget on this machine of one instance of the model that `config` describes."""
    groups = config.get("instance_group", [])
    instances = sum(int(group.get("count", 1)) * max(1, len(group.get("gpus", []))) for group in groups)
    return ThreadBudget(available_cores(), max(1, instances), is_one_session)


def available_cores() -> int:
    """The cores that this process may use: its affinity, or its cgroup's CPU quota where that is less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(CGROUP_ROOT, Path("/proc/self/cgroup"))
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def cgroup_quota(root: Path, own_cgroup: Path) -> float | None:
    """The smallest CPU quota in cores over this process's cgroup and its parents; None without a limit."""
    quotas = [quota for folder in _folders(root, own_cgroup) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _folders(root: Path, own_cgroup: Path) -> list[Path]:
    """Version 2 has one line `0::/a/b`; version 1's CPU controller is found at its root, as containers see it."""
    own = [line.split(":", 2)[2] for line in _read(own_cgroup).splitlines() if line.startswith("0::")]
    nested = [root.joinpath(*Path(path).parts[1:]) for path in own]
    above = [parent for path in nested for parent in path.parents if parent.is_relative_to(root)]
    return [*nested, *above, root, root / "cpu"]


def _quota(folder: Path) -> float | None:
    """Version 2 has `cpu.max`, "150000 100000" or "max 100000"; version 1 has two files, -1 is none."""
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
