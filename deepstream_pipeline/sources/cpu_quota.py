"""How much of the cores' time a process may use, where its container (`--cpus`) or service (`CPUQuota=`) bounds it."""

from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def quota_cores(root: Path = CONTROL_GROUPS, own: Path = _OWN) -> float | None:
    """The least of this process's group and of those above it, in cores; None where there is no bound to be seen.

    root: where the system shows the groups. own: the file that says which one is this process's.
    """
    quotas = [quota for folder in _folders(root, own) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _folders(root: Path, own: Path) -> list[Path]:
    """Version 2 has one line `0::/a/b`; version 1's CPU controller is found at its root, as containers see it."""
    paths = [line.split(":", 2)[2] for line in _read(own).splitlines() if line.startswith("0::")]
    nested = [root.joinpath(*Path(path).parts[1:]) for path in paths]
    above = [parent for path in nested for parent in path.parents if parent.is_relative_to(root)]
    return [*nested, *above, root, root / "cpu"]


def _quota(folder: Path) -> float | None:
    """Version 2 has `cpu.max`, "200000 100000" or "max 100000"; version 1 has two files, and -1 is none."""
    words = _read(folder / "cpu.max").split()
    words = words or (_read(folder / "cpu.cfs_quota_us") + _read(folder / "cpu.cfs_period_us")).split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or words[1] == "0":
        return None
    return int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
