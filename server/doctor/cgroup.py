"""The control group that this process is in: its version, and its memory limit."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 62  # version 1 writes "no limit" as the largest multiple of a page


def version(root: Path = ROOT) -> int:
    """2 where the unified hierarchy is mounted, 1 where controllers are mounted apart, 0 for none."""
    if (root / "cgroup.controllers").exists():
        return 2
    return 1 if (root / "memory").is_dir() or (root / "cpu").is_dir() else 0


def memory_limit_bytes(root: Path = ROOT, own: Path = OWN) -> int | None:
    """The smallest limit over this process's group and its parents; None without one."""
    limits = [limit for folder in _folders(root, own) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _folders(root: Path, own: Path) -> list[Path]:
    """A container sees its own group at the root; a service sees it nested."""
    found = [root, root / "memory"]
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / controllers
        nested = top.joinpath(*Path(path).parts[1:])
        found += [folder for folder in (nested, *nested.parents) if folder.is_relative_to(top)]
    return found


def _limit(folder: Path) -> int | None:
    text = (_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
